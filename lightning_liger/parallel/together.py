"""Steps that some ranks take and all wait for."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException


def is_first() -> bool:
    """Whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def together(act: Callable[[], object] | None, what: str, group: dist.ProcessGroup | None = None) -> None:
    """Run ``act`` where there is one and meet; an error on one rank is an error on all, not a hang.

    Args:
        act: What this rank does; ``None`` to wait for the others.
        what: Names the step in the error.
        group: The ranks that take part, all by default.

    Raises:
        RuntimeError: ``act`` failed on some rank.
    """
    error: BaseException | None = None
    try:
        if act is not None:
            act()
    except (Exception, CheckpointException) as raised:  # the latter is no Exception
        error = raised
    messages = [None if error is None else repr(error)]
    if dist.is_initialized():
        mine = messages[0]
        messages = [None] * dist.get_world_size(group)
        dist.all_gather_object(messages, mine, group=group)
    failed = next(((rank, message) for rank, message in enumerate(messages) if message), None)
    if failed is not None:
        raise RuntimeError(f"{what} failed on rank {failed[0]}: {failed[1]}") from error
