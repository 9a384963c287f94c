"""What the examples share: options, data and a model to begin with, and the account of what the callback gained.

Nothing in here is needed to use the callback.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L

from docstrings import write_docstring_pairs
from lightning_liger.bench.worker import quiet
from lightning_liger.printing import printable, table
from sft_data import read_pairs
from small_model import SmallModel, save_small_model

CPU = {"max_steps": 12, "batch_size": 8, "max_length": 256, "lr": 3e-4, "strategy": "auto"}
GPU = {"max_steps": 200, "batch_size": 32, "max_length": 2048, "lr": 1e-5, "strategy": "liger_fsdp"}
TOLERANCE = 1e-5
FIRST = 5  # steps whose losses are compared
GPU_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


def parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options of every example. ``defaults`` replace those for a CPU; ``--gpu`` brings its own."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--gpu", action="store_true", help=f"train {GPU_MODEL} on all GPUs of this machine under liger_fsdp, in bf16")
    add("--data", metavar="FILE.jsonl", help="rows to train on (default: the standard library's docstrings)")
    add("--model", metavar="PATH", help="checkpoint directory or name on the Hub (default: small and random, on a CPU)")
    for name, default in {**CPU, **defaults}.items():
        add(f"--{name.replace('_', '-')}", type=type(default), help=f"(default: {default}; with --gpu: {GPU[name]})")
    add("--seed", type=int, default=0)
    add("--output", metavar="DIR", type=Path, default=Path("demo_output"), help="(default: %(default)s)")
    add("--layers", type=int, default=4, help="of the small model (default: %(default)s)")
    add("--hidden-size", type=int, default=256, help="of the small model, a multiple of 64 (default: %(default)s)")
    add("--vocab-size", type=int, default=8192, help="of the small model (default: %(default)s)")
    add("--compare", action=argparse.BooleanOptionalAction, help="train without the callback, too (default on a CPU)")
    made.set_defaults(cpu={**CPU, **defaults})
    return made


def prepare(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what was not given: defaults, the data, and the small model."""
    quiet()
    for name, value in (GPU if args.gpu else args.cpu).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.compare is None:
        args.compare = not args.gpu
    args.output.mkdir(parents=True, exist_ok=True)
    if args.data is None:
        args.data = str(args.output / "docstrings.jsonl")
        write_docstring_pairs(Path(args.data))
    if args.model is None and args.gpu:
        args.model = GPU_MODEL
    if args.model is None:
        args.model = str(args.output / "small_model")
        texts = (text for pair in read_pairs(args.data) for text in pair)
        size = SmallModel(args.layers, args.hidden_size, args.vocab_size, args.max_length, args.seed)
        print(f"model   {save_small_model(texts, size, Path(args.model))}")
    L.seed_everything(args.seed, verbose=False)
    return args


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Of the Trainer: everything but callbacks and strategy."""
    device = {"accelerator": "cuda", "devices": "auto", "precision": "bf16-mixed"}
    return {
        **(device if args.gpu else {"accelerator": "cpu", "devices": 1}),
        "max_steps": args.max_steps,
        "max_epochs": -1,
        "default_root_dir": args.output,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": args.gpu,
        "enable_model_summary": False,
    }


class Stopwatch(L.Callback):
    """Loss and seconds of each training step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"].detach()))
        self.seconds.append(time.perf_counter() - self.started)

    @property
    def step(self) -> float:
        """Of the steps after the first, which pays for what happens once."""
        return median(self.seconds[1:] or self.seconds)


def show_gain(args: argparse.Namespace, callback: Any, watch: Stopwatch, again: Callable[[], tuple[Any, Any]]) -> int:
    """Print what the callback saved; with ``--compare`` beside the same training without it.

    Args:
        again: the module and the data once more.

    Returns:
        The exit code: 1 if the losses of the first steps differ by more than fp32's rounding, which later steps amplify.
    """
    report = callback.report.to_dict()
    padding, head = report["padding_free"], report["fused_head"]
    removed = padding["padding_fraction"] if padding["packed_calls"] else 0.0
    print(f"\nNever computed: {removed:.0%} of all positions, {head['skipped_fraction']:.0%} of the rows of the head.")
    if not args.compare:
        return 0
    plain = Stopwatch()
    L.seed_everything(args.seed, verbose=False)
    module, data = again()
    L.Trainer(callbacks=[plain], **options(args)).fit(module, data)
    pairs = list(zip(watch.losses, plain.losses, strict=True))
    apart = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs[:FIRST])
    rows = [
        ("seconds per step", f"{plain.step:.3f}", f"{watch.step:.3f}", f"{plain.step / watch.step:.2f}×"),
        ("last loss", f"{plain.losses[-1]:.6f}", f"{watch.losses[-1]:.6f}", f"first {FIRST}: {apart:.1e} apart"),
    ]
    print(f"What it gained in {len(watch.losses)} steps")
    print(printable(table(("", "plain", "accelerated", "compared"), rows, numbers=True)))
    exact = not args.gpu and args.strategy == "auto"
    if exact and not apart <= TOLERANCE:
        print(f"FAILED: the losses differ by more than {TOLERANCE:.0e} relative.")
        return 1
    return 0
