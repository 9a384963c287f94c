"""In which order a training loader goes through its dataset, as a function of the epoch; the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_liger.data.planner import Ints

Order = Callable[[int], Ints]


def epoch_order(loader: DataLoader[Any], seed: int) -> Order:
    """The order of ``loader``'s own sampler.

    Args:
        loader: with its final sampler, a ``DistributedSampler`` where there are several ranks.
        seed: for samplers that draw from the global generator; the same on every rank.

    Returns:
        From the epoch to ``(n,)`` dataset indices. A shuffling sampler gives a permutation; any other sampler's own
        order is kept, drawn anew in each epoch from generators that are seeded with ``seed`` and the epoch.

    Raises:
        ValueError: the loader does not batch by itself.
    """
    if loader.batch_sampler is None:
        raise ValueError(
            "max_tokens_per_batch needs a training DataLoader that makes batches (batch_size=None hands out what the "
            "dataset yields). Give it a batch_size, or leave max_tokens_per_batch out."
        )
    if type(loader.batch_sampler) is not BatchSampler:
        return _drawn(loader.batch_sampler, seed, batches=True)
    sampler = loader.sampler
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    if isinstance(sampler, DistributedSampler) and inner is not None:
        return _drawn(inner, seed, batches=False)  # Lightning's wrapper around a sampler of the user's
    count = len(loader.dataset)  # type: ignore[arg-type]
    if isinstance(sampler, DistributedSampler):
        return _permuted(count, sampler.seed) if sampler.shuffle else _in_order(count)
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == count:
        return _permuted(count, seed if sampler.generator is None else sampler.generator.initial_seed())
    if type(sampler) is SequentialSampler:
        return _in_order(count)
    return _drawn(sampler, seed, batches=False)


def _in_order(count: int) -> Order:
    indices = np.arange(count)
    return lambda epoch: indices


def _permuted(count: int, seed: int) -> Order:
    """``DistributedSampler``'s own permutation of each epoch."""

    def order(epoch: int) -> Ints:
        generator = torch.Generator().manual_seed((seed + epoch) % 2**63)
        return torch.randperm(count, generator=generator).numpy()

    return order


def _drawn(sampler: Iterable[Any], seed: int, *, batches: bool) -> Order:
    def order(epoch: int) -> Ints:
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        own = getattr(sampler, "generator", None)
        own = own if isinstance(own, torch.Generator) else None
        before = None if own is None else own.get_state()
        python_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed + epoch)
                random.seed(seed + epoch)
                np.random.seed((seed + epoch) % 2**32)
                if own is not None:
                    own.manual_seed(seed + epoch)
                drawn = list(sampler)
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            if own is not None and before is not None:
                own.set_state(before)
        return np.asarray([i for batch in drawn for i in batch] if batches else drawn, dtype=np.int64)

    return order
