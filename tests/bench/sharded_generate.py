"""``generate()`` on a model that ``liger_fsdp`` shards: gathered for an evaluation loop, for each call, and in lock step.

    torchrun --nproc-per-node=2 tests/bench/sharded_generate.py --size 0.5b
    torchrun --nproc-per-node=2 tests/bench/sharded_generate.py --size 7b --tokens 32

Every rank decodes greedily with a KV cache, rank 1 twice as far as rank 0; the tokens should be those of the unsharded
model. Printed are tokens per second of all ranks together and the peak of allocated memory.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from qwen_training import RANK, SHAPES, WORLD, qwen
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerFSDPStrategy
from lightning_liger.parallel.gathering import Gathering

DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")


class Module(L.LightningModule):
    def __init__(self, size: str, tokens: int, wanted: list[int] | None) -> None:
        super().__init__()
        # a random model's logits are close to each other: wider weights tell tokens apart in bf16, too
        self.model = qwen(size, DEVICE, torch.bfloat16, initializer_range=0.1).eval()
        self.tokens = tokens * (1 + RANK)
        self.wanted = wanted
        self.rate = self.same = 0.0

    def generate(self) -> list[int]:
        prompt = torch.arange(100, 132, device=self.device)[None] + 50 * RANK
        # with a cache in all runs: passes over one token and over all of them round differently in bf16, and lock step
        # always has one
        made = self.model.generate(
            prompt, do_sample=False, max_new_tokens=self.tokens, eos_token_id=None, use_cache=True
        )
        return made[0].tolist()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        begin = time.perf_counter()
        made = self.generate()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if batch_idx:  # the first is for warming up
            total = torch.tensor(self.tokens / (time.perf_counter() - begin), device=self.device)
            dist.all_reduce(total)
            self.rate = float(total)
            found = torch.tensor([a == b for a, b in zip(made, self.wanted or [], strict=True)], device=self.device)
            least = found.float().mean()
            dist.all_reduce(least, dist.ReduceOp.MIN)
            self.same = float(least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="0.5b")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cuda = DEVICE.type == "cuda"
    if cuda:
        torch.cuda.set_device(DEVICE)
    alone = Module(options.size, options.tokens, None).to(DEVICE)
    with torch.no_grad():
        wanted = alone.generate()
    del alone
    if RANK == 0:
        print(f"{options.size}, {WORLD} ranks, {options.tokens} and {2 * options.tokens} tokens by turns", flush=True)
    for name, gather, fits in (("whole loop", "auto", True), ("each call", False, True), ("lock step", False, False)):
        module = Module(options.size, options.tokens, wanted)
        strategy: Any = LigerFSDPStrategy(gather_in_evaluation=gather)
        trainer = L.Trainer(
            accelerator="gpu" if cuda else "cpu",
            devices=WORLD,
            precision="bf16-true",
            strategy=strategy,
            callbacks=[LigerCallback(kernels=False, verbose=False)],
            limit_val_batches=2,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        if not fits:
            Gathering.fits = lambda self: False  # type: ignore[method-assign]
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.validate(module, DataLoader(range(2)), verbose=False)  # type: ignore[arg-type]
        if RANK == 0:
            peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
            print(
                f"{name:<12} {module.rate:10.1f} tokens/s {peak:8.2f} GiB  {module.same:.0%} of the tokens as unsharded",
                flush=True,
            )
        del module, trainer, strategy
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
