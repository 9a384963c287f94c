"""Steps of a full fine-tune on several GPUs: ``strategy="liger_fsdp"`` beside Lightning's own ``FSDPStrategy``.

    python tests/bench/fsdp_step.py --gpus 2
    python tests/bench/fsdp_step.py --gpus 2 --variants 14b-16k-selective --steps 10

Every variant is a launch of its own, so that no memory of another one is counted. Models have the shapes of Qwen2.5 and
random weights; lengths are like GSM8K's, prompts are ignored; fp32 master weights and AdamW state everywhere, bf16
compute. Tokens are real ones, without padding. MFU is ``6 N tokens/s`` over ``--peak``, N without the input embedding.

``-p1`` and ``-p2`` gather one and two blocks ahead, ``-pool``, ``-symmetric`` and ``-engines`` gather in other ways
(``fsdp_communication.py``).

Memory is printed by phase of a step, as the most that was allocated in it, beside what the memory plan said. Bytes are
those handed to reduce-scatters and all-gathers by one rank in one step, beside those of all parameters once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from fsdp_communication import GatherBy, Way, environment
from qwen_training import RANK, SHAPES, WORLD, Clock, Finetune, batches, parameters, wait
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerFSDPStrategy


@dataclass(frozen=True)
class Variant:
    """``size``, a batch of ``sequences`` rows or about ``tokens`` tokens, options of the strategy (None: stock), and how
    blocks are gathered (None: as FSDP does)."""

    size: str
    options: dict[str, Any] | None
    sequences: int = 0
    tokens: int = 0
    way: Way | None = None


VARIANTS = {
    "7b-stock-8": Variant("7b", None, sequences=8),
    "7b-8": Variant("7b", {}, sequences=8),
    "7b-16k": Variant("7b", {}, tokens=16384),
    "7b-16k-selective": Variant("7b", {"activation_checkpointing": "selective"}, tokens=16384),
    "14b-stock-4": Variant("14b", None, sequences=4),
    "14b-16k-full": Variant("14b", {"activation_checkpointing": "full"}, tokens=16384),
    "14b-16k-selective": Variant("14b", {"activation_checkpointing": "selective"}, tokens=16384),
    "14b-16k-bf16-state": Variant(
        "14b", {"activation_checkpointing": "selective", "optimizer_state_dtype": "bf16"}, tokens=16384
    ),
    "7b-16k-bf16-state": Variant("7b", {"optimizer_state_dtype": "bf16"}, tokens=16384),
    "14b-8k-selective": Variant("14b", {"activation_checkpointing": "selective"}, tokens=8192),
    "14b-24k-selective": Variant("14b", {"activation_checkpointing": "selective"}, tokens=24576),
    "tiny-stock": Variant("tiny", None, sequences=8),
    "tiny": Variant("tiny", {"activation_checkpointing": "selective"}, tokens=2048),
}
WAYS: dict[str, Way] = {"pool": "pool", "symmetric": "symmetric", "engines": "copy engines"}
for _name in ("7b-16k", "14b-16k-selective", "tiny"):
    _given = VARIANTS[_name]
    assert _given.options is not None
    for _depth in (1, 2):
        VARIANTS[f"{_name}-p{_depth}"] = replace(_given, options={**_given.options, "prefetch": _depth})
    VARIANTS |= {f"{_name}-{_end}": replace(_given, way=_way) for _end, _way in WAYS.items()}
DEFAULT = "7b-stock-8 7b-16k 7b-16k-selective 14b-stock-4 14b-16k-full 14b-16k-selective 14b-8k-selective"


class Phases(L.Callback):
    """Memory of one step: the most that was allocated in each phase, and what is at its end."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: list[tuple[str, float, float]] = []
        self.sent: Counter[str] = Counter()

    def _mark(self, name: str, trainer: Any) -> None:
        if trainer.global_step != self.step or not torch.cuda.is_available():
            return
        wait()
        self.rows.append((name, torch.cuda.max_memory_allocated() / 2**30, torch.cuda.memory_allocated() / 2**30))
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and torch.cuda.is_available():
            wait()
            torch.cuda.reset_peak_memory_stats()
            blocks = pl_module.model.model.layers
            blocks[0].register_forward_pre_hook(lambda *_: self._mark("root gathered", trainer))
            blocks[-1].register_forward_hook(lambda *_: self._mark("blocks ran", trainer))
            blocks[len(blocks) // 2].register_forward_hook(lambda m, i, out: self._watch(out, trainer))
        if trainer.global_step == self.step:
            _count_collectives(self.sent)

    def _watch(self, output: Any, trainer: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if trainer.global_step == self.step and hidden.requires_grad:
            hidden.register_hook(lambda _: self._mark("backward, first half", trainer))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._mark("forward ended", trainer)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._mark("backward, second half", trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step + 1 and torch.cuda.is_available() and len(self.rows) < 6:
            wait()
            now = torch.cuda.memory_allocated() / 2**30
            self.rows.append(("optimizer stepped", torch.cuda.max_memory_allocated() / 2**30, now))
            _count_collectives(None)


# the second two names are those of torch 2.13
_NAMES = {"reduce_scatter_tensor": "reduced", "all_gather_into_tensor": "gathered"}
_NAMES |= {"reduce_scatter_single": "reduced", "all_gather_single": "gathered"}
_OWN = {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}


def _count_collectives(sent: Counter[str] | None) -> None:
    """The bytes of the larger side: what is reduced, and what has been gathered."""
    for name, own in _OWN.items():

        def counted(*args: Any, own: Any = own, name: str = name, **kwargs: Any) -> Any:
            sizes = [t.nbytes for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            sent[_NAMES[name]] += max(sizes)  # type: ignore[index]
            return own(*args, **kwargs)

        setattr(dist, name, own if sent is None else counted)


def run(name: str, steps: int, warmup: int, peak: float) -> None:
    variant, on_gpu = VARIANTS[name], torch.cuda.is_available()
    clock, phases, callback = Clock(), Phases(steps - 1), LigerCallback(verbose=False)
    module = Finetune(variant.size, "cuda" if on_gpu else "cpu", torch.float32)
    data = batches(
        SHAPES[variant.size]["vocab_size"], steps, sequences=variant.sequences, tokens=variant.tokens, seed=100 + RANK
    )
    if variant.options is None:
        from lightning.pytorch.strategies import FSDPStrategy
        from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

        strategy: Any = FSDPStrategy(auto_wrap_policy={Qwen2DecoderLayer}, use_orig_params=True)
    else:
        strategy = LigerFSDPStrategy(**variant.options)
    trainer = L.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=WORLD,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[
            *([] if variant.options is None else [callback]),
            *([] if variant.way is None else [GatherBy(variant.way)]),
            clock,
            phases,
        ],
    )
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    real = torch.tensor([float(b["attention_mask"].sum()) for b in data], device=module.losses[0].device)
    if dist.is_initialized():
        dist.all_reduce(real)
    rates = [n / WORLD / s for n, s in zip(real.tolist(), clock.seconds, strict=True)][warmup:-1]
    if RANK == 0:
        rate, seconds = statistics.median(rates), statistics.median(clock.seconds[warmup:-1])
        mfu = 6 * parameters(variant.size) * rate / peak / 1e12
        print(
            f"{name:<26} {rate:>8,.0f} tok/s/GPU {mfu:>6.1%} MFU {1000 * seconds:>7,.0f} ms  "
            f"{real.mean().item() / WORLD:,.0f} tokens  loss {float(module.losses[0]):.4f} {float(module.losses[-1]):.4f}",
            flush=True,
        )
        _print_memory(phases, variant, callback.report.to_dict().get("memory_plan") or {})


def _print_memory(phases: Phases, variant: Variant, plan: dict[str, Any]) -> None:
    every = 1e9 / parameters(variant.size, embedding=True)
    print(
        f"{'':<26} bytes of one step over those of all parameters: reduced {phases.sent['reduced'] / 4e9 * every:.2f} "
        f"in fp32 (1 expected), gathered {phases.sent['gathered'] / 2e9 * every:.2f} in bf16 (1 if kept, else 2)"
    )
    if not phases.rows:
        return
    stats = torch.cuda.memory_stats()
    rows = "  ".join(f"{name} {most:.1f}/{end:.1f}" for name, most, end in phases.rows)
    print(f"{'':<26} GiB, most/at the end: {rows}")
    print(
        f"{'':<26} reserved {stats['reserved_bytes.all.peak'] / 2**30:.1f} GiB, "
        f"{stats['num_alloc_retries']} retries, {torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB free at the end"
    )
    if plan:
        used = max(most for _, most, _ in phases.rows)
        moments = "  ".join(f"{name} {size / 2**30:.1f}" for name, size in plan["moments"].items())
        print(
            f"{'':<26} planned {plan['peak'] / 2**30:.1f} GiB for {used:.1f} used ({plan['peak'] / 2**30 / used:.3f}): {moments}"
        )
        print(
            f"{'':<26} selective keeps: {plan.get('kept', '-')}; blocks kept gathered: {plan['keeps_blocks']}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=DEFAULT.split(), choices=VARIANTS)
    parser.add_argument("--gpus", type=int, default=2, help="ranks of each launch; CPUs where there is no GPU")
    parser.add_argument("--steps", type=int, default=6, help="the last one is looked into, and not timed")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--peak", type=float, default=989.0, help="dense bf16 TFLOP/s of one GPU")
    parser.add_argument("--limit", type=float, default=80.0, help="seconds for one variant")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        warnings.filterwarnings("ignore")
        for name in args.variants:
            run(name, args.steps, args.warmup, args.peak)
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads need not survive the end of the interpreter
    for name in args.variants:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
        own = [
            __file__,
            "--inside",
            "--variants",
            name,
            "--steps",
            args.steps,
            "--warmup",
            args.warmup,
            "--peak",
            args.peak,
        ]
        began = time.perf_counter()
        worker = subprocess.Popen(
            [*launch, *map(str, own)],
            env={**os.environ, **environment(VARIANTS[name].way)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said, _ = worker.communicate(timeout=args.limit)
        except subprocess.TimeoutExpired:
            worker.terminate()  # torchrun ends its workers
            said, _ = worker.communicate()
            print(f"{name:<26} more than {args.limit:.0f} s")
        lines = said.splitlines()
        result = next((i for i, line in enumerate(lines) if line.startswith(f"{name} ")), None)
        if result is not None:
            print("\n".join(lines[result : result + 5]))
        else:
            memory = next((line for line in lines if "OutOfMemoryError" in line), None)
            print(f"{name:<26} {memory or 'failed'}")
            if memory is None:
                # torchrun's own account of it stands at the end
                print("\n".join([*dict.fromkeys(line for line in lines if "Error: " in line), *lines[-25:]]))
        print(f"{'':<26} {time.perf_counter() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
