"""Training steps of a plain and an accelerated Trainer on one GPU, alternating, at the shapes of Qwen2.5.

    python tests/bench/finetune_step.py --data train.jsonl [--size 0.5b 7b] [--batch-size 32]

Models are randomly initialised from their real configurations. Rows are ``question``/``answer`` texts; a token is a
word or a punctuation mark, hashed into the vocabulary, and the question's labels are ignored.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import warnings
import zlib
from pathlib import Path
from typing import Any

import lightning as L
import torch
from qwen_training import SHAPES, Clock, Finetune
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback


def load(path: Path, limit: int) -> list[tuple[list[int], list[int]]]:
    def ids(text: str) -> list[int]:
        return [1 + zlib.crc32(w.encode()) % 150000 for w in re.findall(r"\w+|[^\w\s]", text)]

    rows = [json.loads(line) for line in path.open()][:limit]
    return [(ids(r["question"]), ids(r["answer"])) for r in rows]


def collate(rows: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    width = max(len(q) + len(a) for q, a in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, (question, answer) in enumerate(rows):
        n = len(question) + len(answer)
        ids[i, :n] = torch.tensor(question + answer)
        mask[i, :n] = 1
        labels[i, len(question) : n] = torch.tensor(answer)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def run(args: argparse.Namespace, size: str, callbacks: list[L.Callback], data: Any) -> dict[str, Any]:
    clock = Clock()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    module = Finetune(size, "cuda", fused=True)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision=args.precision,
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, clock],
    )
    loader = DataLoader(data, args.batch_size, collate_fn=collate, shuffle=False)
    try:
        trainer.fit(module, loader)
    except torch.cuda.OutOfMemoryError:
        return {"oom": True}
    tokens = [int(b["attention_mask"].sum()) for b, _ in zip(loader, range(args.steps), strict=False)]
    measured = slice(args.warmup, None)
    return {
        "tokens_per_second": statistics.median(
            n / s for n, s in zip(tokens[measured], clock.seconds[measured], strict=True)
        ),
        "median_ms": 1000 * statistics.median(clock.seconds[measured]),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "losses": [float(x) for x in module.losses],
        "tokens": sum(tokens) / len(tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", nargs="+", default=["0.5b"], choices=SHAPES)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", default="bf16-true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    data = load(args.data, args.batch_size * args.steps)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.precision}, {args.batch_size} sequences")
    for size in args.size:
        variants: dict[str, Any] = {
            "plain": lambda: [],
            "kernels=False": lambda: [LigerCallback(kernels=False, verbose=False)],
            "kernels=True": lambda: [LigerCallback(kernels=True, verbose=False)],
        }
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
        for _ in range(args.rounds):
            for name, callbacks in variants.items():
                results[name].append(run(args, size, callbacks(), data))
        print(f"{'size':>5} {'variant':<22} {'tok/s':>9} {'median ms':>10} {'peak GB':>8}  first and last loss")
        for name, rounds in results.items():
            if any("oom" in r for r in rounds):
                print(f"{size:>5} {name:<22} out of memory")
                continue
            best = sorted(rounds, key=lambda r: r["tokens_per_second"])[len(rounds) // 2]
            losses = best["losses"]
            print(
                f"{size:>5} {name:<22} {best['tokens_per_second']:>9,.0f} {best['median_ms']:>10.1f} "
                f"{best['peak_gb']:>8.1f}  {losses[0]:.4f} {losses[-1]:.4f}  ({best['tokens']:.0f} tokens a step)",
                flush=True,
            )


if __name__ == "__main__":
    main()
