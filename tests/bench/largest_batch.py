"""The largest batch that trains, plain and padded against accelerated, by bisection: how many tokens fit into one GPU.

    python tests/bench/largest_batch.py --size 7b

Random Qwen2.5, the samples of ``--suite gsm8k`` in their order, AdamW (fused), ``bf16-true`` at 7B. A batch of the first n
samples fits if two optimizer steps on it run (the second has the optimizer's state beside its activations). Bisection ends
when 3% or one sample lie between what fits and what does not. The accelerated module keeps its blocks as they are
(``compile=False``), because choosing how they run would be timed anew for each size; kernels, the fused head and padding
removal are on. ``--limit-gb`` allows that much memory only: of the device, or of the address space of a CPU process.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback
from lightning_liger.bench import gsm8k
from lightning_liger.bench.staying import stay
from lightning_liger.bench.task import Sample, Task
from lightning_liger.bench.worker import quiet

CUDA = torch.cuda.is_available()
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "accelerated": {"kernels": CUDA, "compile": False, "verify": "off", "verbose": False},
}


class Losses(L.Callback):
    """Of each step, read when training is over; the module stays where it is for the next batch."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        stay(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.found.append(outputs["loss"].detach())


def train(module: Any, task: Task, samples: list[Sample], options: dict[str, Any] | None) -> tuple[float, float]:
    """Two steps on one batch: the first loss, and the peak memory in GB.

    Raises:
        RuntimeError: it does not fit.
    """
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses = Losses()
    batch = task.collate(samples)
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        precision=task.precision,  # type: ignore[arg-type]
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([] if options is None else [LigerCallback(**options)]), losses],
    )
    trainer.fit(module, DataLoader([batch, batch], batch_size=None))
    return float(losses.found[0]), torch.cuda.max_memory_allocated() / 1e9 if CUDA else 0.0


def fits(module: Any, task: Task, samples: list[Sample], options: dict[str, Any] | None) -> tuple[float, float] | None:
    """As :func:`train`; None where memory runs out, all of it given back."""
    try:
        return train(module, task, samples, options)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "memory" not in str(error):
            raise
    finally:
        module.zero_grad(set_to_none=True)
        module.trainer = None
        gc.collect()
    return None


def largest(module: Any, task: Task, samples: list[Sample], options: dict[str, Any] | None) -> dict[str, float]:
    """What is known of the largest batch that fits; tokens are real ones."""
    count, best = 4, {"sequences": 0, "tokens": 0.0, "positions": 0.0, "gb": 0.0, "first_loss": float("nan")}
    low, high = 0, len(samples) + 1
    while high - low > max(1, 0.03 * low):
        began = time.perf_counter()
        part = samples[:count]
        found = fits(module, task, part, options)
        lengths = [len(ids) for ids, _ in part]
        seconds = time.perf_counter() - began
        print(
            f"  {count} sequences, {sum(lengths):,} tokens: {'fits' if found else 'does not fit'}, {seconds:.0f} s",
            flush=True,
        )
        if found:
            low, positions = count, count * max(lengths)
            best = {
                "sequences": count,
                "tokens": sum(lengths),
                "positions": positions,
                "gb": found[1],
                "first_loss": found[0],
            }
        else:
            high = count
        # doubled until it fails, then halfway
        count = min(2 * count, len(samples)) if high > len(samples) else (low + high) // 2
        if low == len(samples):
            break
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b", choices=gsm8k.SHAPES)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--most", type=int, default=2048, help="sequences to try at most")
    parser.add_argument("--limit-gb", type=float)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    quiet()
    task = gsm8k.build(args.size).task
    assert task is not None
    samples = [s for batch in islice(task.loader(list), -(-args.most // 8)) for s in batch][: args.most]
    if args.limit_gb:
        limit(args.limit_gb)
    L.seed_everything(0, verbose=False)
    results = {}
    module = gsm8k.build(args.size).module
    for name in args.variants:
        print(f"{name}:", flush=True)
        results[name] = largest(module, task, samples, VARIANTS[name])
    print(
        "\n| variant | sequences | tokens | positions with padding | peak GB | tokens / plain's |\n|---|---|---|---|---|---|"
    )
    plain = results.get("plain", {}).get("tokens") or float("nan")
    for name, r in results.items():
        cells = f"{r['sequences']} | {r['tokens']:,.0f} | {r['positions']:,.0f} | {r['gb']:.1f}"
        print(f"| {args.size} {name} | {cells} | {r['tokens'] / plain:.2f} |")
    if args.json:
        args.json.write_text(json.dumps({"size": args.size, **results}, indent=2))


def limit(gigabytes: float) -> None:
    if CUDA:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total))
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (int(gigabytes * 1e9), -1))


if __name__ == "__main__":
    main()
