"""Tokens per second on several GPUs: a loader's own batches beside batches by tokens.

    torchrun --nproc-per-node=2 tests/bench/balanced_batches.py --size 0.5b
    torchrun --nproc-per-node=2 tests/bench/balanced_batches.py --size tiny --device cpu --budget 512 --batch-size 4

Variants, each on the same random samples, in a model that has lost its padding: ``plain``, the user's batch size;
``keep_samples``, as many samples per step, dealt evenly; ``budget``, full batches; ``unbalanced``, batches as full, from
random samples, whose ranks hold different amounts of work. Lengths are log-normal with mean 966, at most 4,096, or GSM8K's
(``--lengths gsm8k``). Tokens are real ones of all ranks, over the steps after ``--warm-up``.
"""

from __future__ import annotations

import argparse
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
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_liger import LigerCallback, LigerFSDPStrategy

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCAB = {"tiny": 512, "0.5b": 151_936}
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
}
HEADS = {"tiny": (4, 2), "0.5b": (14, 2)}


class Module(L.LightningModule):
    def __init__(self, size: str, warm_up: int) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, Qwen2Config

        torch.manual_seed(0)
        heads, groups = HEADS[size]
        config = Qwen2Config(
            **SHAPES[size],
            vocab_size=VOCAB[size],
            num_attention_heads=heads,
            num_key_value_heads=groups,
            tie_word_embeddings=True,
        )
        self.model = AutoModelForCausalLM.from_config(config).train()
        self.warm_up, self.tokens, self.begin = warm_up, 0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == self.warm_up:
            _wait(self.device)
            self.begin = time.perf_counter()
        if batch_idx >= self.warm_up:
            self.tokens += batch.pop("real")
        else:
            batch.pop("real")
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


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


def _run(name: str, args: argparse.Namespace, rows: Any, lengths: Any) -> None:
    budget: Any = {"keep_samples": "keep_samples", "budget": args.budget}.get(name)
    own: dict[str, Any] = {"batch_size": args.batch_size, "shuffle": True}
    if name == "unbalanced":
        own = {"batch_sampler": Unbalanced(lengths, args.budget, args.warm_up + args.steps)}
    module = Module(args.size, args.warm_up)
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator=args.device,
        devices=WORLD,
        strategy=LigerFSDPStrategy(),
        max_steps=args.warm_up + args.steps,
        callbacks=[LigerCallback(verbose=False, max_tokens_per_batch=budget)],
        use_distributed_sampler=name != "unbalanced",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, collate_fn=_collate, num_workers=2, **own))
    _wait(trainer.strategy.root_device)
    seconds = time.perf_counter() - module.begin
    tokens = torch.tensor(float(module.tokens), device=trainer.strategy.root_device)
    dist.all_reduce(tokens)
    if RANK == 0:
        per_step = float(tokens) / args.steps / WORLD
        print(
            f"{name:>14}: {float(tokens) / seconds:10,.0f} tokens/s  {per_step:8,.0f} tokens per rank and step  "
            f"{seconds / args.steps * 1e3:8.1f} ms per step",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--lengths", choices=["heavy", "gsm8k"], default="heavy")
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=8)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    shorter = 16 if args.size == "tiny" else 1
    mean = float(_lengths(args.lengths, 1000).mean()) / shorter
    # one epoch: a second one would begin in the middle of what is measured
    count = int(1.2 * (args.steps + args.warm_up) * WORLD * max(args.budget / mean, args.batch_size))
    lengths = _lengths(args.lengths, count) // shorter + 3
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, VOCAB[args.size], (int(n),), generator=generator) for n in lengths]
    for name in ("plain", "keep_samples", "unbalanced", "budget"):
        _run(name, args, rows, lengths)


if __name__ == "__main__":
    main()
