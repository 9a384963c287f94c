"""Distributed samplers that somebody else made, for ranks that are now fewer."""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import DistributedSampler


def divide_by_groups(loader: Any, world_size: int, global_rank: int, *, num_replicas: int, rank: int) -> None:
    """Let samplers of ``loader`` that divide a dataset among all ranks divide it among groups of ranks.

    ``DistributedSampler(dataset)`` asks the process group how many ranks there are; Lightning leaves it as it is.
    """
    sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) if sampler is None else sampler
    met: set[int] = set()
    while sampler is not None and id(sampler) not in met:
        met.add(id(sampler))
        if isinstance(sampler, DistributedSampler) and (sampler.num_replicas, sampler.rank) == (
            world_size,
            global_rank,
        ):
            sampler.num_replicas, sampler.rank = num_replicas, rank
            count = len(sampler.dataset)  # type: ignore[arg-type]
            # as DistributedSampler.__init__ counts
            short = sampler.drop_last and count % num_replicas
            sampler.num_samples = math.ceil((count - num_replicas if short else count) / num_replicas)
            sampler.total_size = sampler.num_samples * num_replicas
        sampler = getattr(sampler, "sampler", None)
