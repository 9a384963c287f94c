"""Tokens per second on several GPUs: a loader's own batches beside batches by tokens, in one table.

    torchrun --nproc-per-node=2 tests/bench/balanced_batches.py --size 0.5b
    torchrun --nproc-per-node=2 tests/bench/balanced_batches.py --size tiny --device cpu --budget 512 --batch-size 4

Variants, each on the same random samples, in a model that has lost its padding: ``own``, the user's batch size;
``keep_samples``, as many samples per step, dealt evenly; ``unbalanced``, full batches of random samples, whose ranks hold
different amounts of work; ``budget``, full batches of like cost; on request
``auto``, as full as the memory of the device allows, or ``--memory`` GB of it. Lengths are log-normal with mean 966, at most 4,096, or
GSM8K's (``--lengths gsm8k``). Tokens are real ones of all ranks, over the steps after ``--warm-up``; max/mean is of their tokens, the mean of steps.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from qwen_training import RANK, SHAPES, WORLD, Finetune, wait
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_liger import LigerCallback, LigerFSDPStrategy

VARIANTS = ("own", "keep_samples", "unbalanced", "budget", "auto")


class Counted(Finetune):
    """Notes what each step holds, and when the first measured one began."""

    def __init__(self, size: str, device: str, warm_up: int) -> None:
        super().__init__(size, device)
        self.warm_up, self.begin = warm_up, 0.0
        self.tokens: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if batch_idx == self.warm_up:
            wait()
            dist.barrier()
            self.begin = time.perf_counter()
        self.tokens.append(batch.pop("real"))
        return super().training_step(batch, batch_idx)


class Unbalanced(Sampler[list[int]]):
    """Each rank fills batches by itself, in random order."""

    def __init__(self, lengths: Any, budget: int, steps: int) -> None:
        self.lengths, self.budget, self.steps = lengths, budget, steps

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(np.random.default_rng(RANK).permutation(len(self.lengths)).tolist())
        batch: list[int] = []
        for _ in range(self.steps):
            room = self.budget - sum(self.lengths[i] for i in batch)
            for i in order:
                if self.lengths[i] > room:
                    yield batch
                    batch = [i]
                    break
                batch.append(i)
                room -= self.lengths[i]

    def __len__(self) -> int:
        return self.steps


def _lengths(name: str, count: int) -> Any:
    random = np.random.default_rng(0)
    if name == "gsm8k":
        shares = np.loadtxt(Path(__file__).parents[1] / "data" / "gsm8k_lengths.txt", dtype=int)
        return random.choice(np.repeat(shares[:, 0], shares[:, 1]), count)
    return np.clip(random.lognormal(np.log(966) - 0.5, 1.0, count).astype(int), 8, 4096)


def _collate(rows: list[Tensor]) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(r) for r in rows])[:, None]
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels, "real": int(mask.sum())}


def _run(name: str, args: argparse.Namespace, rows: Any, lengths: Any) -> str:
    """One line of the table."""
    steps = args.warm_up + args.steps
    budget: Any = {"keep_samples": "keep_samples", "budget": args.budget, "auto": "auto"}.get(name)
    own: dict[str, Any] = {"batch_size": args.batch_size, "shuffle": True}
    if name == "unbalanced":
        own = {"batch_sampler": Unbalanced(lengths, args.budget, steps)}
    module = Counted(args.size, args.device, args.warm_up)
    L.seed_everything(0, verbose=False)
    length_fn: dict[str, Any] = {} if budget is None else {"length_fn": len}
    trainer = L.Trainer(
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=WORLD,
        strategy=LigerFSDPStrategy(),
        max_steps=steps,
        callbacks=[LigerCallback(verbose=False, max_tokens_per_batch=budget, **length_fn)],
        use_distributed_sampler=name != "unbalanced",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, collate_fn=_collate, num_workers=args.workers, **own))
    wait()
    dist.barrier()
    seconds = time.perf_counter() - module.begin
    device = trainer.strategy.root_device
    mine = torch.tensor(module.tokens[args.warm_up :], dtype=torch.float32, device=device)
    each = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(each, mine)
    ranks = torch.stack(each).double().cpu()  # (ranks, steps)
    uneven = float((ranks.max(0).values / ranks.mean(0)).mean())
    peak = torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else 0.0
    return (
        f"| {name} | {float(ranks.sum()) / seconds:,.0f} | {float(ranks.mean()):,.0f} | {uneven:.3f} "
        f"| {seconds / args.steps * 1e3:,.0f} | {peak:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--lengths", choices=["heavy", "gsm8k"], default="heavy")
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS[:-1]))
    parser.add_argument("--memory", type=float, help="GB of each device that may be used")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if args.memory:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_per_process_memory_fraction(args.memory * 1e9 / torch.cuda.mem_get_info()[1])
    shorter = 16 if args.size == "tiny" else 1
    mean = float(_lengths(args.lengths, 1000).mean()) / shorter
    # one epoch: a second one would begin in the middle of what is measured
    count = int(
        1.2
        * (args.steps + args.warm_up)
        * WORLD
        * max((8 if "auto" in args.variants else 1) * args.budget / mean, args.batch_size)
    )
    lengths = _lengths(args.lengths, count) // shorter + 3
    generator = torch.Generator().manual_seed(0)
    vocabulary = SHAPES[args.size]["vocab_size"]
    rows = [torch.randint(1, vocabulary, (int(n),), generator=generator) for n in lengths]
    start = time.perf_counter()
    lines = []
    for name in args.variants:
        lines.append(_run(name, args, rows, lengths))
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if RANK == 0:
        where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        print(f"{WORLD} x {where}, Qwen2.5-{args.size}, {args.lengths} lengths, budget {args.budget:,}, ", end="")
        print(f"own batch size {args.batch_size}; {time.perf_counter() - start:.0f} s in all")
        print("| batches | tokens/s | tokens per rank and step | max/mean of ranks | ms per step | peak GB |")
        print("|---|---|---|---|---|---|", *lines, sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
