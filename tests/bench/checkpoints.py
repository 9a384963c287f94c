"""What checkpoints of a sharded model cost: seconds that training stands still, seconds until written, host memory.

    torchrun --standalone --nproc-per-node=2 tests/bench/checkpoints.py --size 0.5b --folder /tmp/ckpt

fp32 weights with AdamW state: 12 bytes a parameter.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from qwen_training import RANK, SHAPES, WORLD, Finetune, batches
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerFSDPStrategy


class Measure(L.Callback):
    """Saves at the end of the second step, in every way, and reads the clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 2:
            return
        strategy = trainer.strategy
        for kind in ("sharded", "full"):
            for later in (False, True):
                strategy._state_dict_type, strategy._async_save = kind, later
                path = self.folder / f"{kind}-{later}.ckpt"
                start = self._now(strategy)
                trainer.save_checkpoint(path)
                stood = self._now(strategy) - start
                strategy._saves.wait()
                what = f"save {kind}{', async' if later else ''}"
                _tell(what, stood, self._now(strategy) - start, _size(path))
                strategy.barrier()  # all have looked at it
                if later:
                    strategy.remove_checkpoint(path)
        start = self._now(strategy)
        strategy.save_hf(self.folder / "hf", dtype="bfloat16")
        took = self._now(strategy) - start
        _tell("save_hf, bf16", took, took, _size(self.folder / "hf"))

    def _now(self, strategy: Any) -> float:
        strategy.barrier()
        return time.perf_counter()


def _tell(what: str, stood: float, done: float, size: int = 0) -> None:
    if RANK == 0:
        print(f"{what:<32} {stood:>17.2f} s {done:>10.2f} s {size / 2**30:>7.2f} GiB", flush=True)


def _size(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*")) if path.is_dir() else path.stat().st_size


def _trainer(callbacks: list[Any], steps: int, accelerator: str) -> L.Trainer:
    return L.Trainer(
        accelerator=accelerator,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=LigerFSDPStrategy(),
        callbacks=[LigerCallback(verbose=False), *callbacks],
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="0.5b")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--accelerator", default="auto")
    given = parser.parse_args()
    where = "cuda" if torch.cuda.is_available() and given.accelerator != "cpu" else "cpu"
    data = DataLoader(batches(SHAPES[given.size]["vocab_size"], 8, sequences=2), batch_size=None)  # type: ignore[arg-type]
    if RANK == 0:
        print(
            f"{given.size + ', ' + str(WORLD) + ' ranks':<32} training stands still   done after        size",
            flush=True,
        )
    measure = Measure(given.folder)
    _trainer([measure], 2, given.accelerator).fit(Finetune(given.size, where, torch.float32), data)
    for kind in ("sharded", "full"):
        start = time.perf_counter()
        trainer = _trainer([], 3, given.accelerator)
        module = Finetune(given.size, where, torch.float32)
        trainer.fit(module, data, ckpt_path=given.folder / f"{kind}-False.ckpt")
        assert trainer.global_step == 3
        took = time.perf_counter() - start
        _tell(f"resume {kind}, with one step", took, took)
    if RANK == 0:
        print(f"host memory of rank 0, at most: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")
        shutil.rmtree(given.folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
