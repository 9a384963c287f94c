"""Steps of a full fine-tune under DeepSpeed, with and without the callback, beside ``strategy="liger_fsdp"``.

    python tests/bench/deepspeed_steps.py --size 1.5b --gpus 2

Every variant trains the same module on the same batches in processes of its own, so that no memory of one is counted
for another. The strategies are Lightning's names (``deepspeed_stage_2``, ...), the optimizer is PyTorch's fused AdamW in
all of them, and DeepSpeed needs none of its compiled ops. Weights are random and rounded to bf16, because DeepSpeed makes
its fp32 masters of bf16 weights; compute is bf16. Tokens are real ones, without padding; the peak is that of the steps
after the warm-up. On a machine without GPUs, ``--size tiny`` runs two gloo processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ON_WORKER = "DEEPSPEED_STEPS" in os.environ
VARIANTS = [
    "deepspeed_stage_2",
    "deepspeed_stage_2+liger",
    "deepspeed_stage_3",
    "deepspeed_stage_3+liger",
    "liger_fsdp",
]


def train(variant: str, size: str, sequences: int, steps: int, warmup: int) -> dict[str, Any]:
    """One variant, in this process of several."""
    import lightning as L
    import torch
    from qwen_training import RANK, SHAPES, WORLD, Clock, batches
    from torch import Tensor
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, Qwen2Config

    from lightning_liger import LigerCallback

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")

    class Module(L.LightningModule):
        """An ordinary module: it passes labels and takes the loss."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = Qwen2Config(**SHAPES[size], max_position_embeddings=32768, rope_theta=1e6, use_cache=False)
            with device:  # billions of random numbers take minutes on a CPU
                self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
            for parameter in self.model.parameters():
                parameter.data.copy_(parameter.data.bfloat16())
            self.losses: list[Tensor] = []

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=on_gpu)

    class Peak(L.Callback):
        """Of the steps after the warm-up: casts and buffers of the start are not training."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == warmup and on_gpu:
                torch.cuda.reset_peak_memory_stats()

    name, _, accelerated = variant.partition("+")
    strategy: Any = name
    if name.startswith("deepspeed") and not on_gpu:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from zero_anywhere import ZeroAnywhere, zero_config

        strategy = ZeroAnywhere(config=zero_config(int(name[-1])))
    callbacks: list[Any] = [LigerCallback(verbose=False)] if accelerated or name == "liger_fsdp" else []
    clock = Clock()
    module = Module()
    data = batches(SHAPES[size]["vocab_size"], steps, sequences=sequences, seed=100 + RANK)
    # Lightning asks the loader for a batch size to tell DeepSpeed
    loader = DataLoader(data, batch_size=1, collate_fn=lambda rows: rows[0])  # type: ignore[arg-type,var-annotated]
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
        callbacks=[*callbacks, clock, Peak()],
    )
    trainer.fit(module, loader)
    real = torch.tensor([float(b["attention_mask"].sum()) for b in data], device=device)
    losses = torch.stack(module.losses).double().to(device)
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0, device=device)
    torch.distributed.all_reduce(real)
    torch.distributed.all_reduce(losses)
    torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    rates = [n / WORLD / s for n, s in zip(real.tolist(), clock.seconds, strict=True)][warmup:]
    report = callbacks[0].report.to_dict() if callbacks else {}
    return {
        "variant": variant,
        "rank": RANK,
        "tokens_per_second": statistics.median(rates),
        "seconds": statistics.median(clock.seconds[warmup:]),
        "peak_gb": float(peak),
        "losses": (losses / WORLD).tolist(),
        "fused": report.get("fused_head", {}).get("fused_calls"),
        "packed": report.get("padding_free", {}).get("packed_calls"),
    }


def launch(variant: str, args: argparse.Namespace, out: Path) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
    options = ["--variants", variant, "--size", args.size, "--steps", str(args.steps), "--warmup", str(args.warmup)]
    command += [__file__, *options, "--sequences", str(args.sequences)]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "DEEPSPEED_STEPS": str(out)},
            capture_output=True,
            text=True,
            timeout=args.timeout,
        )
    except subprocess.TimeoutExpired:
        print(f"{variant:<24} took longer than {args.timeout} s", flush=True)
        return None
    if done.returncode or not out.exists():
        reason = "out of memory" if "OutOfMemoryError" in done.stderr else done.stderr[-1500:]
        print(f"{variant:<24} failed: {reason}", flush=True)
        return None
    found = json.loads(out.read_text())
    print(
        f"{variant:<24} {found['tokens_per_second']:>9,.0f} tok/s/GPU {1000 * found['seconds']:>7.0f} ms "
        f"{found['peak_gb']:>6.1f} GB  losses {found['losses'][0]:.4f} ... {found['losses'][-1]:.4f}  "
        f"fused {found['fused']} packed {found['packed']}  {time.perf_counter() - began:.0f} s in all",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.5b", choices=["tiny", "1.5b", "7b"])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=16, help="rows of a batch on each GPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one variant")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    args = parser.parse_args()
    if ON_WORKER:
        warnings.filterwarnings("ignore")
        found = train(args.variants[0], args.size, args.sequences, args.steps, args.warmup)
        if found["rank"] == 0:
            Path(os.environ["DEEPSPEED_STEPS"]).write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # what engines and process groups do at the end is not measured
    with tempfile.TemporaryDirectory() as folder:
        runs = [launch(v, args, Path(folder) / f"{i}.json") for i, v in enumerate(args.variants)]
    done = [r for r in runs if r is not None]
    for run in done:
        beside = next((r for r in done if r["variant"] == run["variant"].removesuffix("+liger")), done[0])
        if beside is run:
            beside = done[0]
        worst = max(abs(a - b) / abs(b) for a, b in zip(run["losses"], beside["losses"], strict=True))
        print(f"{run['variant']}: losses at most {worst:.1e} from {beside['variant']}")
    if args.json is not None:
        args.json.write_text(json.dumps(done))
    sys.exit(len(done) < len(runs))


if __name__ == "__main__":
    main()
