"""How others make batches by tokens, written from their published descriptions, to compare with.

Each gives ``(steps, ranks)`` lists of sample positions; samples that it drops are in none.
"""

from __future__ import annotations

import bisect
import heapq

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Batches = list[list[list[int]]]


def trl_best_fit_decreasing(lengths: Ints, budget: int, ranks: int, chunk: int = 1000) -> Batches:
    """TRL ``pack_dataset(strategy="bfd")``: best-fit decreasing, here in map-style chunks of 1,000 samples.

    Bins become batches in their order, and ranks take turns, as its distributed sampler would; the last step is
    dropped when it does not give every rank one.
    """
    bins: list[list[int]] = []
    for start in range(0, len(lengths), chunk):
        part = lengths[start : start + chunk]
        rooms: list[tuple[int, int]] = []  # (room left, bin), sorted
        made: list[list[int]] = []
        for i in np.argsort(-part, kind="stable"):
            at = bisect.bisect_left(rooms, (int(part[i]), -1))
            if at == len(rooms):
                made.append([])
                room, number = budget, len(made) - 1
            else:
                room, number = rooms.pop(at)
            made[number].append(start + int(i))
            bisect.insort(rooms, (room - int(part[i]), number))
        bins += made
    return _in_turn(bins, ranks)


def axolotl_multipack(lengths: Ints, budget: int, ranks: int, group: int = 100_000) -> Batches:
    """axolotl ``MultipackBatchSampler``: first-fit decreasing within a group, ranks truncated to the shortest one."""
    bins: list[list[int]] = []
    for start in range(0, len(lengths), group):
        part = lengths[start : start + group]
        rooms: list[int] = []
        made: list[list[int]] = []
        for i in np.argsort(-part, kind="stable"):
            need = int(part[i])
            at = next((k for k, room in enumerate(rooms) if room >= need), None)
            if at is None:
                rooms.append(budget)
                made.append([])
                at = len(rooms) - 1
            rooms[at] -= need
            made[at].append(start + int(i))
        bins += made
    return _in_turn(bins, ranks)


def verl_karmarkar_karp(lengths: Ints, budget: int, ranks: int, batch: int) -> Batches:
    """verl ``use_dynamic_bsz`` with ``balance_batch``: a global batch of ``batch`` samples is dealt to ranks by the
    largest differencing method with equal sizes, then each rank cuts its share into as many micro-batches, by the same
    method, as the fullest rank needs to stay within the budget."""
    steps: Batches = []
    for start in range(0, len(lengths) - batch + 1, batch):
        positions = list(range(start, start + batch))
        shares = _karmarkar_karp([int(lengths[p]) for p in positions], ranks, equal_size=True)
        micro = max(-(-sum(int(lengths[positions[i]]) for i in share) // budget) for share in shares)
        cut = []
        for share in shares:
            mine = [positions[i] for i in share]
            parts = _karmarkar_karp([int(lengths[p]) for p in mine], micro, equal_size=False)
            cut.append([[mine[i] for i in part] for part in parts])
        steps += [[rank[m] for rank in cut] for m in range(micro)]
    return steps


def _karmarkar_karp(weights: list[int], parts: int, *, equal_size: bool) -> list[list[int]]:
    """Karmarkar and Karp, 1982: merge the two states of the largest spread, heaviest set with lightest."""
    order = sorted(range(len(weights)), key=lambda i: weights[i])
    states: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    groups = [order[i : i + parts] for i in range(0, len(order), parts)] if equal_size else [[i] for i in order]
    for tie, group in enumerate(groups):
        sets = [(weights[i], [i]) for i in group] + [(0, [])] * (parts - len(group))
        sets.sort(key=lambda s: -s[0])
        heapq.heappush(states, (-(sets[0][0] - sets[-1][0]), tie, sets))
    tie = len(groups)
    while len(states) > 1:
        a, b = heapq.heappop(states)[2], heapq.heappop(states)[2]
        sets = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        sets.sort(key=lambda s: -s[0])
        heapq.heappush(states, (-(sets[0][0] - sets[-1][0]), tie, sets))
        tie += 1
    return [s[1] for s in states[0][2]]


def _in_turn(bins: list[list[int]], ranks: int) -> Batches:
    whole = len(bins) // ranks * ranks
    return [bins[i : i + ranks] for i in range(0, whole, ranks)]
