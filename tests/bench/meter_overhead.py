"""What the meter costs on one GPU, and all that it says about Qwen2.5's 0.5B and 7B shapes.

    python tests/bench/meter_overhead.py [--size 0.5b 7b] [--blocks 24]

One training of the first size, in which blocks of ten steps with the meter and without it take turns; the device is
waited for between blocks only. The time that the host spends inside of the meter's hooks is summed as well: it is what
a step that waits for its launches loses. Then a few steps of every size, and their metrics.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from qwen_training import SHAPES, Finetune, batches, wait
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback
from lightning_liger.meter.meter import Meter

BLOCK = 10
WARM_UP = 2  # blocks


class Turns(L.Callback):
    """Takes the meter out of the callback's hooks for every second block, and sums the time inside of it."""

    def __init__(self, ours: LigerCallback) -> None:
        self.ours = ours
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.inside = 0.0
        self.steps_inside = 0
        self._meter: Meter | None = None
        self._began = 0.0

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        (self._meter,) = (h for h in self.ours._hooks if isinstance(h, Meter))
        hooks = ("begin_batch", "before_backward", "after_backward", "before_optimizer_step", "end_batch")
        for name in hooks:
            setattr(self._meter, name, self._timed(getattr(self._meter, name)))

    def _timed(self, hook: Any) -> Any:
        def timed(*args: Any) -> None:
            began = time.perf_counter()
            hook(*args)
            self.inside += time.perf_counter() - began

        return timed

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index % BLOCK:
            return
        wait()
        block = index // BLOCK
        if block > WARM_UP:
            self.seconds[(block - 1) % 2 == 0].append((time.perf_counter() - self._began) / BLOCK)
        assert self._meter is not None
        on = block % 2 == 0
        others = [h for h in self.ours._hooks if h is not self._meter]
        self.ours._hooks = [*others, self._meter] if on else others
        for log in (self.ours.report.padding.log, self.ours.report.head.log):
            log.wanted = on
        if block == WARM_UP:  # what happens once: the model is read, a step watched, a peak perhaps measured
            self.inside, self.steps_inside = 0.0, 0
        self.steps_inside += BLOCK * on
        self._began = time.perf_counter()


def train(size: str, steps: int, rows: int, logger: Any, *extra: Any) -> LigerCallback:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ours = LigerCallback(compile=False, verbose=False, verify="off")
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-true",
        max_steps=steps,
        log_every_n_steps=BLOCK,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # ours is called after the one that takes turns
        callbacks=[*(e(ours) for e in extra), ours],
    )
    data = batches(SHAPES[size]["vocab_size"], steps, sequences=rows)
    trainer.fit(Finetune(size, "cuda", torch.bfloat16, fused=True), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", default=["0.5b", "7b"])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--rows", type=int, default=16)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16-true, {args.rows} sequences a batch")
    made: list[Turns] = []

    def turns(ours: LigerCallback) -> Turns:
        made.append(Turns(ours))
        return made[-1]

    with tempfile.TemporaryDirectory() as folder:
        train(args.size[0], BLOCK * (WARM_UP + args.blocks) + 1, args.rows, CSVLogger(folder), turns)
        (seen,) = made
        on, off = seen.seconds[True], seen.seconds[False]
        pairs = [a / b - 1 for a, b in zip(on, off, strict=False)]
        host = seen.inside / seen.steps_inside
        middle = statistics.median(off)
        print(
            f"{args.size[0]}: {1000 * statistics.median(on):.2f} ms per step with the meter, {1000 * middle:.2f} ms without: "
            f"median of {len(pairs)} pairs {statistics.median(pairs):+.2%}, from {min(pairs):+.2%} to {max(pairs):+.2%}"
        )
        print(
            f"{args.size[0]}: {1e6 * host:.0f} us of the host's time per step in the meter, {host / middle:.2%} of it"
        )
        for size in args.size:
            ours = train(size, 2 * BLOCK, args.rows, CSVLogger(folder))
            print(f"\n{size}: {ours.report.meter['utilisation_of']}")
            for name, value in ours.report.metrics.items():
                print(f"  {name:<30} {value:,.4f}")
            for note in ours.report.notes:
                print(f"  - {note}")


if __name__ == "__main__":
    main()
