"""Sums over a stretch of training, on this rank and over all of them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from lightning_liger.meter.phases import Step

PREFIX = "liger/"
PHASES = {"data": "data_wait"} | {phase: phase for phase in ("forward", "backward", "optimizer", "other")}


@dataclass
class Sums:
    """What adds up: over steps, and over ranks.

    Attributes:
        seconds: of wall time. steps: of the optimizer. batches: of the loader.
        tokens: real ones. positions: padding included. samples: documents.
        model, hardware: floating-point operations; see :mod:`lightning_liger.meter.flops`.
        data, forward, backward, optimizer, other: seconds of the steps whose times are known, by phase.
        timed: how many those are. launches: how many of them waited for the host; see :class:`Step`.
        spikes: of the loss.
    """

    seconds: float = 0.0
    steps: float = 0.0
    batches: float = 0.0
    tokens: float = 0.0
    positions: float = 0.0
    samples: float = 0.0
    model: float = 0.0
    hardware: float = 0.0
    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    timed: float = 0.0
    launches: float = 0.0
    spikes: float = 0.0

    @property
    def measured(self) -> float:
        """Seconds of the steps whose times are known."""
        return self.data + self.forward + self.backward + self.optimizer + self.other

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def add(self, step: Step) -> None:
        """The times of one batch."""
        for phase, seconds in step.seconds.items():
            setattr(self, phase, getattr(self, phase) + seconds)
        self.timed += 1
        self.launches += step.waited_for_launches

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


def gathered(mine: dict[str, float], world_size: int, device: torch.device) -> list[dict[str, float]]:
    """``mine`` of every rank, in order. A collective where there are several."""
    if world_size == 1:
        return [mine]
    sent = torch.tensor(list(mine.values()), dtype=torch.float32, device=device)
    received = [torch.empty_like(sent) for _ in range(world_size)]
    torch.distributed.all_gather(received, sent)
    return [dict(zip(mine, (float(v) for v in r.tolist()), strict=True)) for r in received]


def rates(ranks: Ranks, budget: int = 0) -> dict[str, float]:
    """Metrics of a stretch, without their prefix.

    Args:
        ranks: ``added["ceiling"]`` holds the FLOP/s of all devices together, ``largest["blind"]`` is 1 where any rank
            does not know its own.
        budget: tokens per batch that were asked for; 0 without one.

    Rates are left out where no backbone was seen: a module without one has no tokens that we know of.
    """
    made: dict[str, float] = {}
    total, seconds, ceiling = ranks.total, ranks.seconds, 0.0 if ranks.largest["blind"] else ranks.added["ceiling"]
    if seconds <= 0:
        return made
    if total.steps:
        made["step_seconds"] = seconds / ranks.most.steps
    if total.positions:
        made["tokens_per_second"] = total.tokens / seconds
        made["samples_per_second"] = total.samples / seconds
        made["padding_fraction"] = 1 - total.tokens / total.positions
        if budget and total.batches:
            made["fill_fraction"] = total.tokens / (budget * total.batches)
        if ranks.count > 1:
            made["rank_imbalance"] = ranks.imbalance
        if ceiling and total.model:
            made["mfu"] = total.model / seconds / ceiling
            made["hfu"] = total.hardware / seconds / ceiling
    if timed := total.measured:
        made |= {f"{name}_fraction": getattr(total, phase) / timed for phase, name in PHASES.items()}
    return made
