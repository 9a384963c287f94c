"""In which order a training loader goes through its dataset, as a function of the epoch; the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_liger.data.planner import Ints
from lightning_liger.data.randomness import random_numbers_untouched


@dataclass(frozen=True)
class Order:
    """
    Attributes:
        draw: from a seed and an epoch to ``(n,)`` dataset indices.
        seed: what this training draws with. It belongs to a checkpoint: another process may have another.
    """

    draw: Callable[[int, int], Ints]
    seed: int


def epoch_order(loader: DataLoader[Any], seed: int) -> Order:
    """The order of ``loader``'s own sampler, for all ranks together.

    A shuffling sampler gives a permutation; any other sampler's own order is kept, drawn anew in each epoch from
    generators that are seeded with the seed and the epoch.

    Args:
        loader: with its final sampler, a ``DistributedSampler`` where there are several ranks.
        seed: for samplers that draw from the global generator; the same on every rank.

    Raises:
        ValueError: the loader does not batch by itself.
    """
    if loader.batch_sampler is None:
        raise ValueError(
            "max_tokens_per_batch needs a training DataLoader that makes batches (batch_size=None hands out what the "
            "dataset yields). Give it a batch_size, or leave max_tokens_per_batch out."
        )
    if not _is_plain(loader.batch_sampler):
        return Order(_drawn(loader.batch_sampler, batches=True), seed)
    sampler = loader.sampler
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    if isinstance(sampler, DistributedSampler) and inner is not None:
        return Order(_drawn(inner, batches=False), seed)  # Lightning's wrapper around a sampler of the user's
    count = len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is DistributedSampler:
        return Order(_permuted(count) if sampler.shuffle else _in_order(count), sampler.seed)
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == count:
        return Order(_permuted(count), seed if sampler.generator is None else sampler.generator.initial_seed())
    if type(sampler) is SequentialSampler:
        return Order(_in_order(count), seed)
    return Order(_drawn(sampler, batches=False), seed)


def shared_by_ranks(loader: DataLoader[Any]) -> bool:
    """Whether ranks divide what this loader reads, instead of each reading a loader of its own."""
    return any(isinstance(s, DistributedSampler) for s in _nested(loader.batch_sampler))


def _is_plain(batch_sampler: Any) -> bool:
    kind = type(batch_sampler)
    return kind is BatchSampler or (kind.__name__ == "BatchSampler" and kind.__module__.startswith("torchdata."))


def _nested(sampler: Any) -> list[Any]:
    found = []
    while sampler is not None and sampler not in found:
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def _in_order(count: int) -> Callable[[int, int], Ints]:
    indices = np.arange(count)
    return lambda seed, epoch: indices


def _permuted(count: int) -> Callable[[int, int], Ints]:
    """``DistributedSampler``'s own permutation of each epoch."""

    def draw(seed: int, epoch: int) -> Ints:
        generator = torch.Generator().manual_seed((seed + epoch) % 2**63)
        return torch.randperm(count, generator=generator).numpy()

    return draw


def _drawn(sampler: Any, *, batches: bool) -> Callable[[int, int], Ints]:
    parts = _nested(sampler)

    def draw(seed: int, epoch: int) -> Ints:
        for part in parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
        generators = [g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)]
        with _seeded((seed + epoch) % 2**32, generators), _as_one_rank(parts):
            drawn = list(sampler)
        return np.asarray([i for batch in drawn for i in batch] if batches else drawn, dtype=np.int64)

    return draw


@contextmanager
def _seeded(seed: int, generators: list[torch.Generator]) -> Iterator[None]:
    """Every source of random numbers starts from ``seed`` inside, and goes on as before afterwards."""
    before = [g.get_state() for g in generators]
    try:
        with random_numbers_untouched():
            for generator in (torch.default_generator, *generators):
                generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


@contextmanager
def _as_one_rank(samplers: list[Any]) -> Iterator[None]:
    """Distributed samplers give everything once, without what they repeat or drop to give ranks equal shares."""
    distributed = [s for s in samplers if isinstance(s, DistributedSampler)]
    before = [{k: s.__dict__[k] for k in ("num_replicas", "rank", "num_samples", "total_size")} for s in distributed]
    try:
        for sampler in distributed:
            count = len(sampler.dataset)  # type: ignore[arg-type]
            sampler.__dict__.update(num_replicas=1, rank=0, num_samples=count, total_size=count)
        yield
    finally:
        for sampler, state in zip(distributed, before, strict=True):
            sampler.__dict__.update(state)
