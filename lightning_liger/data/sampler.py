"""The batch sampler that a training DataLoader gets instead of its own: one rank's share of the plan of each epoch.

Where in the epoch it starts is said by :meth:`TokenBatchSampler.seek`, from the batches that were trained on; how many
the workers have fetched ahead does not matter. A training that stopped in the middle of an epoch goes on with the
samples that nobody has seen, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, SequentialSampler

from lightning_liger.data.order import Order
from lightning_liger.data.planner import Cost, Ints, Plan, least_steps, plan


@dataclass(frozen=True)
class Share:
    """How a stretch of an epoch is divided.

    Attributes:
        ranks: data-parallel ranks.
        budget: tokens per batch.
        samples: per batch, on average; 0 fills every batch.
    """

    ranks: int
    budget: int
    samples: float = 0.0

    def steps(self, lengths: Ints) -> int:
        """Of each rank, for samples of these lengths in any order."""
        least = least_steps(lengths, self.budget, self.ranks)
        if not self.samples:
            return least
        return min(max(least, round(len(lengths) / (self.samples * self.ranks))), len(lengths) // self.ranks)


@dataclass(frozen=True)
class Stretch:
    """``steps`` of the ``planned`` ones that were trained with one :class:`Share`, before another took over."""

    share: Share
    planned: int
    steps: int


@dataclass(frozen=True)
class Place:
    """Where training is: ``steps`` batches into epoch ``epoch``, both from zero."""

    epoch: int
    steps: int


class TokenBatchSampler(BatchSampler):
    """Batches of at most ``share.budget`` tokens, each rank as many.

    Args:
        order: in which samples are drawn; the same on every rank.
        lengths: ``(dataset,)`` tokens of each sample.
        share: ranks and budget.
        rank: which of the batches of a step are drawn here.
        cost: what is balanced between ranks.
        one_epoch: every epoch is the first one again (``overfit_batches``).
    """

    def __init__(
        self,
        order: Order,
        lengths: Ints,
        share: Share,
        *,
        rank: int,
        cost: Cost | None = None,
        one_epoch: bool = False,
    ) -> None:
        # Lightning and loaders look for these attributes; nothing is drawn from the inner sampler
        super().__init__(SequentialSampler(lengths), batch_size=1, drop_last=False)
        self._order = order
        self._lengths = lengths
        self.share = share
        self._rank = rank
        self.place = Place(0, 0)
        self._cycled = True
        self._seed = order.seed
        self._cost = cost
        self._one_epoch = one_epoch
        self._past: tuple[int, tuple[Stretch, ...]] = (0, ())
        self._made: tuple[int, Ints, Plan] | None = None

    # -- what training does with it --------------------------------------------------------------------------------

    def seek(self, place: Place, *, cycled: bool = True) -> None:
        """Let the next iterator that is drawn from begin at ``place``, and later ones at the beginning of that epoch.

        Loaders with workers make two iterators and use one, and a loader that is shorter than another beside it may be
        gone through several times in an epoch: if it is ``cycled``.
        """
        self.place = place
        self._cycled = cycled

    def __iter__(self) -> Iterator[list[int]]:
        epoch, steps = self.place.epoch, self.place.steps
        self.place = Place(epoch, 0)
        order, made = self._epoch(epoch)
        start = (steps % self.steps(epoch) if self._cycled else steps) - self._steps_before(epoch)
        for step in range(max(start, 0), made.steps):
            yield order[made.batch(step, self._rank)].tolist()

    def __len__(self) -> int:
        """Steps of the epoch that training is in, those already made included."""
        return self.steps(self.place.epoch)

    def steps(self, epoch: int) -> int:
        """Steps of ``epoch`` on every rank. Epochs over the same samples all have as many."""
        return self._steps_before(epoch) + self._epoch(epoch)[1].steps

    @property
    def longest(self) -> int:
        return int(self._lengths.max())

    def tokens(self, place: Place) -> list[int]:
        """Tokens of each sample of the batch at ``place`` on this rank."""
        order, made = self._epoch(place.epoch)
        step = place.steps % self.steps(place.epoch) - self._steps_before(place.epoch)
        return self._lengths[order[made.batch(step, self._rank)]].tolist() if step >= 0 else []

    # -- interruptions ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a loader that restores its sampler and one that does not must come to the same batches."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None

    def progress(self, place: Place) -> dict[str, Any]:
        """How the epoch came to ``place``, for a checkpoint."""
        past = self._before(place.epoch)
        here = Stretch(self.share, self._epoch(place.epoch)[1].steps, place.steps - sum(s.steps for s in past))
        stretches = [*past, here] if here.steps > 0 else past
        return {
            "epoch": place.epoch,
            "seed": self._seed,
            "samples": len(self._lengths),
            "share": (self.share.ranks, self.share.budget, self.share.samples),
            "stretches": [(s.share.ranks, s.share.budget, s.share.samples, s.planned, s.steps) for s in stretches],
        }

    def resume(self, progress: dict[str, Any]) -> None:
        """Go on where :meth:`progress` was written, with the ranks and the budget of now.

        Raises:
            ValueError: the dataset has another number of samples than it had.
        """
        if progress["samples"] != len(self._lengths):
            raise ValueError(
                f"The checkpoint was written in the middle of an epoch over {progress['samples']:,} samples, the "
                f"training dataset now has {len(self._lengths):,}: which of them were seen cannot be told. Resume with "
                "the same dataset, or from a checkpoint written at the end of an epoch."
            )
        stretches = tuple(
            Stretch(Share(ranks, budget, samples), planned, steps)
            for ranks, budget, samples, planned, steps in progress["stretches"]
        )
        if stretches and stretches[-1].share == self.share:
            stretches = stretches[:-1]  # the same plan goes on
        self._seed = progress["seed"]
        self._past = (progress["epoch"], stretches)
        self._made = None
        self.seek(Place(progress["epoch"], sum(s[-1] for s in progress["stretches"])))

    def _before(self, epoch: int) -> tuple[Stretch, ...]:
        at, stretches = self._past
        return stretches if at == epoch else ()

    def _steps_before(self, epoch: int) -> int:
        return sum(s.steps for s in self._before(epoch))

    # -- the plan --------------------------------------------------------------------------------------------------

    def _epoch(self, epoch: int) -> tuple[Ints, Plan]:
        """Dataset indices in their order, and the plan over their positions."""
        if self._made is None or self._made[0] != epoch:
            order = self._order.draw(self._seed, 0 if self._one_epoch else epoch)
            for past in self._before(epoch):
                seen = self._plan(order, epoch, past.share, past.planned).consumed(past.steps)
                order = np.delete(order, seen)
            self._made = (epoch, order, self._plan(order, epoch, self.share, self.share.steps(self._lengths[order])))
        return self._made[1:]

    def _plan(self, order: Ints, epoch: int, share: Share, steps: int) -> Plan:
        seed = hash((self._seed, 0 if self._one_epoch else epoch)) % 2**32
        return plan(self._lengths[order], share.budget, share.ranks, steps=steps, seed=seed, cost=self._cost)
