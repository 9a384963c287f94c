"""Who shares a batch: the ranks among which its packed tokens are divided (DeepSpeed-Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that run one and the same batch, each on a slice of its packed tokens.

    Every rank of the group runs the whole of the user's step on the whole padded batch, and its loss is the whole
    batch's. Gradients are right once they are averaged over all ranks of the job, as data parallelism does, those of one
    group among them: each rank's hold its own slice's part ``size`` times, and what all ranks compute alike once.

    Attributes:
        group: the process group of these ranks.
        rank: this process's number in it. size: how many ranks there are.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def name(self) -> str:
        """Of the process group, as operators take it."""
        return str(self.group.group_name)

    @staticmethod
    def of(group: dist.ProcessGroup) -> SequenceGroup:
        """Of a process group that this rank is in."""
        return SequenceGroup(group, dist.get_rank(group), dist.get_world_size(group))

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceGroup:
        return self  # a copied model runs on the same ranks
