"""What several processes agree on before they go on, or stop, together."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def everywhere(value: _T, trainer: Any) -> list[_T]:
    """The value of every rank. A collective."""
    if trainer.world_size <= 1 or not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def any_rank(value: bool, trainer: Any) -> bool:
    """Whether it is true anywhere. A collective."""
    return any(everywhere(value, trainer))
