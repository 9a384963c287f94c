"""What checkpoints of a sharded model cost: seconds that training stands still, seconds until written, host memory.

``torchrun --standalone --nproc-per-node=2 tests/bench/checkpoints.py --shape 7b --folder /tmp/ckpt``
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerFSDPStrategy

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "vocab_size": 151936},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "vocab_size": 152064},
}  # fmt: skip


class Module(L.LightningModule):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            heads = 2 if self.shape != "7b" else 4
            config = transformers.Qwen2Config(**SHAPES[self.shape], num_key_value_heads=heads, use_cache=False)
            with torch.device("meta"):
                self.model = transformers.Qwen2ForCausalLM(config).train()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-5)


class Measure(L.Callback):
    """Saves at the end of the second step, in every way, and reads the clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {}

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
                self.found[f"{kind}{' async' if later else ''}"] = {
                    "stands still (s)": round(stood, 2),
                    "written after (s)": round(self._now(strategy) - start, 2),
                    "size (GiB)": round(_size(path) / 2**30, 2),
                }
                strategy.barrier()  # all have looked at it
                if later:
                    strategy.remove_checkpoint(path)
        start = self._now(strategy)
        strategy.save_hf(self.folder / "hf", dtype="bfloat16")
        self.found["save_hf bf16 (s)"] = round(self._now(strategy) - start, 2)

    def _now(self, strategy: Any) -> float:
        strategy.barrier()
        return time.perf_counter()


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
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--accelerator", default="auto")
    given = parser.parse_args()
    data = DataLoader(torch.randint(0, 500, (64, 128)), batch_size=1)  # type: ignore[arg-type]
    measure = Measure(given.folder)
    _trainer([measure], 2, given.accelerator).fit(Module(given.shape), data)
    for kind in ("sharded", "full"):
        start = time.perf_counter()
        trainer = _trainer([], 3, given.accelerator)
        trainer.fit(Module(given.shape), data, ckpt_path=given.folder / f"{kind}-False.ckpt")
        assert trainer.global_step == 3
        measure.found[f"{kind} resumed and one step (s)"] = round(time.perf_counter() - start, 2)
    measure.found["peak host memory of this rank (GiB)"] = round(
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2
    )
    if torch.distributed.get_rank() == 0:
        print(json.dumps(measure.found, indent=1))
        shutil.rmtree(given.folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
