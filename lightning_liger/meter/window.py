"""Sums over a stretch of training, on this rank and over all of them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

PREFIX = "liger/"


@dataclass
class Sums:
    """What adds up: over steps, and over ranks.

    Attributes:
        seconds: of wall time. steps: of the optimizer. batches: of the loader.
        tokens: real ones. positions: padding included. samples: documents.
        model, hardware: floating-point operations; see :mod:`lightning_liger.meter.flops`.
    """

    seconds: float = 0.0
    steps: float = 0.0
    batches: float = 0.0
    tokens: float = 0.0
    positions: float = 0.0
    samples: float = 0.0
    model: float = 0.0
    hardware: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> list[float]:
        return [float(getattr(self, f.name)) for f in fields(self)]


@dataclass(frozen=True)
class Ranks:
    """The sums of all ranks, the largest of them, and the same of other numbers by name."""

    count: int
    total: Sums
    most: Sums
    added: dict[str, float]
    largest: dict[str, float]

    @property
    def seconds(self) -> float:
        """Of the slowest rank: then the sums are what the job really did in them."""
        return self.most.seconds

    @property
    def imbalance(self) -> float:
        """How much more the busiest rank had to do than the average; operations where they are known, else tokens."""
        name = "model" if self.total.model else "tokens"
        mean = getattr(self.total, name) / self.count
        return getattr(self.most, name) / mean - 1 if mean else 0.0


def over_ranks(mine: Sums, others: dict[str, float], world_size: int, copies: int, device: torch.device) -> Ranks:
    """A collective where there are several ranks; every rank passes the same names.

    Args:
        others: numbers that are not sums over steps.
        copies: so many ranks work on the same batch (tensor parallelism), which is counted once.
    """
    if world_size == 1:
        return Ranks(1, mine, mine, others, others)
    values, count = [*mine.values(), *others.values()], len(mine.values())
    total, most = reduced(values, device, "sum"), reduced(values, device, "max")
    names = list(others)
    return Ranks(
        world_size // copies,
        Sums(*(v / copies for v in total[:count])),
        Sums(*most[:count]),
        dict(zip(names, total[count:], strict=True)),
        dict(zip(names, most[count:], strict=True)),
    )


def reduced(values: list[float], device: torch.device, how: str) -> list[float]:
    """``values`` summed or the largest over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
    operation = torch.distributed.ReduceOp.SUM if how == "sum" else torch.distributed.ReduceOp.MAX
    torch.distributed.all_reduce(tensor, op=operation)
    return [float(v) for v in tensor.tolist()]


def rates(ranks: Ranks, ceiling: float | None) -> dict[str, float]:
    """Metrics of a stretch.

    Args:
        ceiling: FLOP/s of all ranks' devices together; None where operations are not known.

    Rates are left out where no backbone was seen: a module without one has no tokens that we know of.
    """
    made: dict[str, float] = {}
    total, seconds = ranks.total, ranks.seconds
    if seconds <= 0:
        return made
    if total.steps:
        made["step_seconds"] = seconds / ranks.most.steps
    if total.positions:
        made["tokens_per_second"] = total.tokens / seconds
        made["samples_per_second"] = total.samples / seconds
        made["padding_fraction"] = 1 - total.tokens / total.positions
        if ranks.count > 1:
            made["rank_imbalance"] = ranks.imbalance
        if ceiling and total.model:
            made["mfu"] = total.model / seconds / ceiling
            made["hfu"] = total.hardware / seconds / ceiling
    return {f"{PREFIX}{name}": value for name, value in made.items()}
