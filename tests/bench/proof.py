"""Both proofs on the shapes of Qwen2.5-0.5B and 7B, with random weights, and what they cost.

python tests/bench/proof.py [--models 0.5b 7b] [--rows 16] [--kernels auto]
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import lightning as L
import torch
from qwen_training import SHAPES, Clock, Finetune
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback


class Module(Finetune):
    """Trained by what keeps no state: the proofs' memory is what is asked for."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-4)


def collate(lengths: list[int]) -> dict[str, Tensor]:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(1, 900, (length,))
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def run(shape: str, rows: int, kernels: Any) -> None:
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    module, clock = Module(shape, "cuda" if on_gpu else "cpu", torch.bfloat16), Clock()
    lengths = (60 + 400 * torch.rand(rows * 6) ** 2).int().tolist()
    callback = LigerCallback(kernels=kernels)
    began = time.perf_counter()
    trainer = L.Trainer(
        callbacks=[callback, clock],
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        precision="bf16-true",
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(lengths, batch_size=rows, collate_fn=collate))  # type: ignore[arg-type]
    proof = callback.report.to_dict()["proof"]
    steps = " ".join(f"{s * 1e3:.0f}" for s in clock.seconds)
    print(f"\n{shape}: {time.perf_counter() - began:.1f} s in all; ms of each step, waiting for the device: {steps}")
    print(f"equivalence: {proof['equivalence']['seconds']:.2f} s; kernel proof: step 3 against step 6")
    if on_gpu:
        print(f"peak memory: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB allocated")
    print(json.dumps(proof, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.5b", "7b"], choices=SHAPES)
    parser.add_argument("--rows", type=int, default=16, help="sequences per batch")
    parser.add_argument("--kernels", choices=["auto", "on"], default="on")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    for shape in given.models:
        run(shape, given.rows, True if given.kernels == "on" else "auto")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
