"""Which samples make up which batch: full batches, the same number on every rank, of like cost within a step.

Samples come in a random (or the user's) order. A *window* of that order is sorted by length and dealt, longest first,
to the batches with the least tokens (LPT: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969), a few at
a time so that numpy does the work. Batches are then sorted by cost, and neighbours become one step: its ranks finish
together. The order of the steps, and which rank gets which batch, is random again.

A plan depends on its arguments alone. Its number of steps depends on the lengths, the budget and the number of ranks,
not on the order, so that every epoch has as many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Batches dealt together. More of them fill better and take longer to forget the order of the samples.
_WINDOW_BATCHES = 1024
# Samples are dealt to one in so many batches at a time: fewer at a time is closer to LPT, and slower.
_DEALT_AT_ONCE = 8
# Emptiest batches that are looked at for an exchange; also one in so many batches may need one.
_FEW = 8
# Beyond this fill some batch of a window is nearly always over the budget.
_REACHABLE_FILL = 0.995


@dataclass(frozen=True)
class Cost:
    """Time of a batch, up to a factor: ``tokens + attention * (sum of squared lengths)``.

    Attributes:
        attention: cost of a pair of attended positions over that of a token. For a decoder of ``N`` parameters with
            ``l`` layers of width ``d``: ``l * d / N``, from ``6 N`` FLOPs per token and ``6 l d L`` per token of a
            causal document of length ``L`` (PaLM, appendix B, halved for the causal mask).
    """

    attention: float = 0.0

    def of(self, lengths: Ints, batch: Ints, batches: int) -> NDArray[np.float64]:
        """``(batches,)`` cost of each batch of samples ``lengths`` ``(n,)`` that went to ``batch`` ``(n,)``."""
        long = lengths.astype(np.float64)
        costs = np.bincount(batch, weights=long + self.attention * long * long, minlength=batches)
        return costs.astype(np.float64)


@dataclass(frozen=True)
class Plan:
    """The batches of one epoch.

    Attributes:
        samples: ``(n,)`` positions in the order that was planned, batch after batch.
        offsets: ``(steps * ranks + 1,)``; batch ``step * ranks + rank`` is ``samples[offsets[b]:offsets[b + 1]]``.
        ranks: number of data-parallel ranks.
    """

    samples: Ints
    offsets: Ints
    ranks: int

    @property
    def steps(self) -> int:
        return (len(self.offsets) - 1) // self.ranks

    def batch(self, step: int, rank: int) -> Ints:
        """Positions of the samples that ``rank`` gets in ``step``."""
        at = step * self.ranks + rank
        return self.samples[self.offsets[at] : self.offsets[at + 1]]

    def consumed(self, steps: int) -> Ints:
        """Positions of the samples that all ranks have had after ``steps``."""
        return self.samples[: self.offsets[steps * self.ranks]]


def least_steps(lengths: Ints, budget: int, ranks: int) -> int:
    """The smallest number of steps that :func:`plan` can pack these samples into; the same for any order of them.

    Args:
        lengths: ``(n,)`` tokens of each sample; one of more than ``budget`` will be a batch of its own.
        budget: tokens per batch.
        ranks: number of data-parallel ranks; each has a batch in every step.

    Raises:
        ValueError: fewer samples than ranks.
    """
    if len(lengths) < ranks:
        raise ValueError(f"{len(lengths)} samples cannot give each of {ranks} ranks a batch.")
    weights = np.sort(_weights(lengths, budget))[::-1]
    most = len(weights) // ranks
    full = int(weights.sum()) / (ranks * budget)
    # a single window may come out perfect; of many, one would not
    steps = min(most, math.ceil(full if full * ranks <= 2 * _WINDOW_BATCHES else full / _REACHABLE_FILL))
    while steps < most and not _fits(_deal(weights, steps * ranks, budget)[1], budget):
        # lengths that do not fill a batch; a long plan need not try every number of steps
        steps = min(most, steps + max(1, steps // 200))
    return steps


def plan(
    lengths: Ints, budget: int, ranks: int, *, steps: int | None = None, seed: int = 0, cost: Cost | None = None
) -> Plan:
    """Pack samples, given in the order in which they should roughly be seen.

    Args:
        lengths: ``(n,)`` tokens of each sample, in that order.
        budget: tokens per batch; no batch of two or more samples holds more.
        ranks: number of data-parallel ranks.
        steps: of the epoch, :func:`least_steps` or more; found by it when left out.
        seed: for the order of steps, and of ranks within a step.
        cost: what to balance within a step; tokens by default.

    Raises:
        ValueError: fewer samples than ranks, or ``steps`` that these samples do not fit into.
    """
    steps = least_steps(lengths, budget, ranks) if steps is None else steps
    weights = _weights(lengths, budget)
    packed = _pack_windows(weights, budget, ranks, steps, max(1, _WINDOW_BATCHES // ranks))
    if packed is None:
        whole = _pack(np.arange(len(weights)), weights, steps * ranks, budget)
        packed = [whole] if whole is not None and _fits(whole.loads, budget) else None
    if packed is None:
        raise ValueError(f"{len(weights)} samples do not fit into {steps} steps of {ranks} batches of {budget} tokens.")
    random = np.random.default_rng([seed, ranks, budget])
    arranged = [_arrange(window, lengths, ranks, cost or Cost(), random) for window in packed]
    offsets = np.concatenate([[0], *(sizes for _, sizes in arranged)]).cumsum()
    return Plan(np.concatenate([samples for samples, _ in arranged]), offsets, ranks)


@dataclass(frozen=True)
class _Window:
    """``samples`` ``(n,)``, the ``batch`` ``(n,)`` of each, and the tokens of each batch, ``loads`` ``(batches,)``."""

    samples: Ints
    batch: Ints
    loads: Ints


def _weights(lengths: Ints, budget: int) -> Ints:
    # an empty sample still has to go somewhere, and one over the budget leaves no room for others
    return np.clip(np.asarray(lengths, dtype=np.int64), 1, budget)


def _pack_windows(weights: Ints, budget: int, ranks: int, steps: int, window: int) -> list[_Window] | None:
    """All samples in windows of ``window`` steps, the last one longer; None if one of them cannot be packed so."""
    ends = weights.cumsum()
    goal = ends[-1] / steps * window  # all windows as full as each other
    late = np.empty(0, dtype=np.int64)  # samples that did not fit where they belong
    start, packed = 0, []
    for _ in range(max(0, steps // window - 1)):
        before = ends[start - 1] if start else 0
        stop = max(start, int(np.searchsorted(ends, before + goal - weights[late].sum(), side="right")))
        made = _pack(np.concatenate([late, np.arange(start, stop)]), weights, window * ranks, budget)
        if made is None:
            return None
        made, late = _without_excess(made, weights, budget)
        packed.append(made)
        start = stop
    left = (steps - window * len(packed)) * ranks
    last = _pack(np.concatenate([late, np.arange(start, len(weights))]), weights, left, budget)
    if last is None or not _fits(last.loads, budget):
        return None
    return [*packed, last]


def _fits(loads: Ints, budget: int) -> bool:
    return int(loads.max()) <= budget


def _pack(samples: Ints, weights: Ints, batches: int, budget: int) -> _Window | None:
    if len(samples) < batches:
        return None
    longest_first = samples[np.argsort(-weights[samples], kind="stable")]
    return _Window(longest_first, *_deal(weights[longest_first], batches, budget))


def _deal(weights: Ints, batches: int, budget: int) -> tuple[Ints, Ints]:
    """Give each sample, longest first, to one of the emptiest batches: its batch, and the tokens of all batches.

    Batches that come out over the budget change a sample with an emptier one, where that helps.
    """
    loads = np.zeros(batches, dtype=np.int64)
    batch = np.empty(len(weights), dtype=np.int64)
    first = min(batches, len(weights))
    batch[:first] = np.arange(first)
    loads[:first] = weights[:first]
    at_once = max(1, batches // _DEALT_AT_ONCE)
    for start in range(first, len(weights), at_once):
        dealt = weights[start : start + at_once]
        emptiest = np.argpartition(loads, len(dealt) - 1)[: len(dealt)]
        emptiest = emptiest[np.argsort(loads[emptiest], kind="stable")]
        batch[start : start + at_once] = emptiest
        loads[emptiest] += dealt
    over = np.flatnonzero(loads > budget)
    if 0 < len(over) <= max(_FEW, batches // _FEW):
        _exchange(over, weights, batch, loads, budget)
    return batch, loads


def _exchange(over: Ints, weights: Ints, batch: Ints, loads: Ints, budget: int) -> None:
    """Bring batches within the budget: each gives a sample for a shorter one of one of the emptiest batches."""
    members = np.argsort(batch, kind="stable")
    ends = np.bincount(batch, minlength=len(loads)).cumsum()
    few = min(_FEW, len(loads) - 1)
    for number in over:
        mine = members[ends[number - 1] if number else 0 : ends[number]]
        for under in np.argpartition(loads, few)[:few]:
            theirs = members[ends[under - 1] if under else 0 : ends[under]]
            theirs.sort()  # longest first again, after exchanges
            shortest_first = theirs[::-1]
            wanted = weights[mine] - (loads[number] - budget)
            at = np.searchsorted(weights[shortest_first], wanted, side="right") - 1
            gain = weights[mine] - weights[shortest_first[at]]
            good = np.flatnonzero((at >= 0) & (gain <= budget - loads[under]))
            if len(good):
                give, take = int(good[-1]), len(theirs) - 1 - int(at[good[-1]])
                batch[mine[give]], batch[theirs[take]] = under, number
                mine[give], theirs[take] = theirs[take], mine[give]
                loads[number] -= gain[give]
                loads[under] += gain[give]
                break


def _without_excess(window: _Window, weights: Ints, budget: int) -> tuple[_Window, Ints]:
    """``window`` without the shortest samples of batches over the budget, and those samples."""
    if window.loads.max() <= budget:
        return window, np.empty(0, dtype=np.int64)
    loads, keep = window.loads.copy(), np.ones(len(window.samples), dtype=bool)
    for at in np.flatnonzero((loads > budget)[window.batch])[::-1]:  # shortest first
        batch = window.batch[at]
        if loads[batch] > budget:
            keep[at] = False
            loads[batch] -= weights[window.samples[at]]
    return _Window(window.samples[keep], window.batch[keep], loads), window.samples[~keep]


def _arrange(window: _Window, lengths: Ints, ranks: int, cost: Cost, random: np.random.Generator) -> tuple[Ints, Ints]:
    """Samples of a window batch after batch, and how many each batch has, in the order of steps and ranks."""
    batches = len(window.loads)
    costs = cost.of(np.asarray(lengths)[window.samples], window.batch, batches)
    steps = np.argsort(costs, kind="stable").reshape(-1, ranks)
    steps = random.permuted(steps[random.permutation(len(steps))], axis=1)
    place = np.empty(batches, dtype=np.int64)
    place[steps.ravel()] = np.arange(batches)
    place = place[window.batch]
    # within a batch, samples stand in the order in which they came
    return window.samples[np.lexsort((window.samples, place))], np.bincount(place, minlength=batches)
