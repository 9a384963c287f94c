"""How full and how even batches by tokens are, beside what others publish: ``python tests/data/figures.py [docs/data.md]``.

Epochs of about 160 steps. Each cell holds the share of the budget that batches use, the mean over steps of the largest
rank's cost over the ranks' mean, and, for those that drop samples, the share that is never seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from published import Batches, axolotl_multipack, trl_best_fit_decreasing, verl_karmarkar_karp

from lightning_liger.data.planner import Cost, Ints, Plan, plan
from lightning_liger.pages import show_or_write

STEPS = 160
BUDGETS = (8192, 16384, 32768)
RANKS = (2, 8, 64)
# time of attention against that of a token: 24 layers of width 896 and 0.49 G parameters, as Qwen2.5-0.5B has
COST = Cost(24 * 896 / 0.49e9)


def gsm8k(count: int) -> Ints:
    """Drawn from the lengths of GSM8K's training set: mean 173 tokens."""
    shares = np.loadtxt(Path(__file__).parent / "gsm8k_lengths.txt", dtype=int)
    return np.random.default_rng(0).choice(np.repeat(shares[:, 0], shares[:, 1]), count)


def heavy_tail(count: int) -> Ints:
    """Log-normal with mean 966 before it is cut at 4,096."""
    random = np.random.default_rng(1)
    return np.clip(random.lognormal(np.log(966) - 0.5, 1.0, count).astype(np.int64), 1, 4096)


DATA: dict[str, Callable[[int], Ints]] = {"GSM8K": gsm8k, "log-normal": heavy_tail}


def epoch(data: Callable[[int], Ints], budget: int, ranks: int, steps: int = STEPS) -> Ints:
    """Lengths of as many samples as ``steps`` steps need: a last step that is not full must not decide."""
    return data(max(steps * ranks, int(steps * ranks * budget / data(1_000).mean())))


def tokens(made: Plan, lengths: Ints) -> Ints:
    """``(steps, ranks)``."""
    return np.add.reduceat(lengths[made.samples], made.offsets[:-1]).reshape(-1, made.ranks)


def costs(made: Plan, lengths: Ints) -> Any:
    each = lengths + COST.attention * lengths.astype(float) ** 2
    return np.add.reduceat(each[made.samples], made.offsets[:-1]).reshape(-1, made.ranks)


def ours(lengths: Ints, budget: int, ranks: int) -> tuple[float, float, float]:
    """``(fill, mean of max/mean, the worst step's)``."""
    made = plan(lengths, budget, ranks, cost=COST)
    imbalance = (cost := costs(made, lengths)).max(1) / cost.mean(1)
    return float(tokens(made, lengths).mean() / budget), float(imbalance.mean()), float(imbalance.max())


def figures(batches: Batches, lengths: Ints, budget: int) -> tuple[float, float, float]:
    """``(fill, mean of max/mean, share of samples that is never seen)``."""
    load = np.array([[lengths[rank].sum() for rank in step] for step in batches])
    cost = np.array([[(lengths[r] + COST.attention * lengths[r].astype(float) ** 2).sum() for r in s] for s in batches])
    seen = sum(len(rank) for step in batches for rank in step)
    return load.mean() / budget, float((cost.max(1) / cost.mean(1)).mean()), 1 - seen / len(lengths)


def others(lengths: Ints, budget: int, ranks: int) -> dict[str, tuple[float, float, float]]:
    """:func:`figures` of each published algorithm."""
    # a global batch of verl's is cut into eight for each rank, the last of them half full on average
    global_batches = max(1, round(lengths.sum() / (7.5 * ranks * budget)))
    per_step = len(lengths) // global_batches // ranks * ranks
    made = {
        "TRL": trl_best_fit_decreasing(lengths, budget, ranks),
        "axolotl": axolotl_multipack(lengths, budget, ranks),
        "verl": verl_karmarkar_karp(lengths, budget, ranks, per_step),
    }
    return {name: figures(batches, lengths, budget) for name, batches in made.items()}


def table() -> str:
    lines = [
        "| lengths | tokens | ranks | ours: fill, max/mean (worst step) | TRL | axolotl | verl |",
        "|---" * 7 + "|",
    ]
    for name, data in DATA.items():
        for budget in BUDGETS:
            for ranks in RANKS:
                lengths = epoch(data, budget, ranks)
                fill, mean, worst = ours(lengths, budget, ranks)
                cells = [name, f"{budget:,}", str(ranks), f"{fill:.1%}, {mean:.3f} ({worst:.3f})"]
                for their_fill, imbalance, lost in others(lengths, budget, ranks).values():
                    cells.append(f"{their_fill:.1%}, {imbalance:.3f}, {lost:.1%} lost")
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(show_or_write(table(), Path(sys.argv[1]) if len(sys.argv) > 1 else None))
