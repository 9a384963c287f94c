"""Is ``"auto"`` ever slower than the best of what it chooses from? Models by tokens in a batch, one GPU.

    python tests/bench/grid.py --sizes 0.5b 1.5b 3b 7b --tokens 2048 4096 8192 16384 32768

Trainers that differ in ``LigerCallback``'s options only run one after the other on the same module (bf16, AdamW with a
learning rate of 0) and the same batches; the median step of each is a cell, the last columns say how many tokens ``"auto"``
trains of those that the best of the others does, and what it chose.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning as L
import torch
from blocks_step import batch, model
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback

VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "native": {"kernels": False, "compile": False},
    "kernels": {"kernels": True, "compile": False},
    "compiled": {"kernels": False, "compile": True},
    "auto": {},
}


class Module(L.LightningModule):
    """An ordinary module."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.model = inner
        self.loss = 0.0

    def training_step(self, given: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**given).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.0, fused=True)

    def on_fit_end(self) -> None:
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()

    def cpu(self) -> Module:
        """Stays on the device: Lightning's way to host memory and back takes longer than the steps."""
        return self


class Clock(L.Callback):
    """Wall time of each step, the device waited for at its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[Tensor] = []
        self._begin = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._begin)
        self.losses.append(outputs["loss"].detach())


def run(module: Module, batches: list[Any], options: dict[str, Any] | None, steps: int) -> tuple[float, float, str]:
    """Median milliseconds, the first loss, and what was decided."""
    gc.collect()
    torch.cuda.empty_cache()
    clock = Clock()
    ours = [] if options is None else [LigerCallback(verbose=False, verify="off", **options)]
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-true",
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*ours, clock],
    )
    trainer.fit(module, DataLoader([batches[i % len(batches)] for i in range(steps)], batch_size=None))
    decided = "; ".join([ours[0].report.blocks.decided, *ours[0].report.blocks.off]) if ours else ""
    # the device is warm, code is compiled and graphs are recorded in the second half
    return 1e3 * statistics.median(clock.seconds[steps // 2 :]), float(clock.losses[0]), decided


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["0.5b", "1.5b", "3b", "7b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=1e9, help="no further cell is begun after so many")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp())  # timed here, not in an earlier run
    begin = time.perf_counter()
    names = args.variants
    print(f"| model | tokens | {' | '.join(names)} | auto/best | losses apart | chosen |")
    print("|---" * (len(names) + 5) + "|")
    for size in args.sizes:
        module = Module(model(size))
        for tokens in args.tokens:
            if time.perf_counter() - begin > args.seconds:
                return
            batches = [batch(tokens, module.model.config.vocab_size, seed) for seed in range(3)]
            cells: dict[str, float] = {}
            losses, decided = [], ""
            for name in names:
                try:
                    cells[name], loss, said = run(module, batches, VARIANTS[name], args.steps)
                    losses.append(loss)
                    decided = said if name == "auto" else decided
                except torch.cuda.OutOfMemoryError:
                    cells[name] = float("inf")
                except Exception as error:
                    cells[name] = float("inf")
                    print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                module.zero_grad(set_to_none=True)
            others = [ms for name, ms in cells.items() if name != "auto"]
            share = f"{min(others) / cells['auto']:.2f}" if others and "auto" in cells else ""
            apart = f"{(max(losses) - min(losses)) / min(losses):.0e}" if losses else ""
            shown = " | ".join(f"{cells[n]:.1f}" for n in names)
            text = re.sub(r"\s+", " ", decided)
            print(f"| {size} | {tokens} | {shown} | {share} | {apart} | {text} |", flush=True)
        del module
        gc.collect()


if __name__ == "__main__":
    main()
