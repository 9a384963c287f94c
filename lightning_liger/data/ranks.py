"""What ranks have to agree on before they make batches."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Found = TypeVar("_Found")


def data_parallel(strategy: Any) -> tuple[int, int]:
    """Number of ranks with data of their own, and which one this is."""
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
    return kwargs["num_replicas"], kwargs["rank"]


def ranks_per_batch(strategy: Any) -> int:
    """How many ranks work on the same batch: with sequence or tensor parallelism."""
    return max(getattr(strategy, "world_size", 1) // max(data_parallel(strategy)[0], 1), 1)


def random_seed() -> int:
    """``seed_everything``'s, or that of the global generator."""
    given = os.environ.get("PL_GLOBAL_SEED")
    return int(given) if given is not None else torch.initial_seed() % 2**31


def from_first_rank(strategy: Any, find: Callable[[], _Found]) -> _Found:
    """What ``find`` gives on rank 0, on all of them; its error too, so that nobody waits for a rank that has none."""
    found: tuple[Any, Exception | None] | None = None
    if strategy.is_global_zero:
        try:
            found = find(), None
        except Exception as error:
            if getattr(strategy, "world_size", 1) == 1:
                raise
            found = None, error if _travels(error) else RuntimeError(f"{type(error).__name__}: {error}")
    value, failure = strategy.broadcast(found)
    if failure is not None:
        raise failure
    return value


def _travels(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False
