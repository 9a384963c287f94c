"""What FSDP2 keeps to itself, in one place.

The public interface neither says whether a group is gathered, nor which dtypes it computes in, nor lets anybody begin
the first forward, which fixes the root, by hand. Checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule


def sharded_parts(module: nn.Module) -> Iterator[FSDPModule]:
    """Every submodule that ``fully_shard`` was called on, ``module`` included."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            yield part


def parameters_of(part: FSDPModule) -> list[Any]:
    """The ``FSDPParam``s of one call of ``fully_shard``: ``sharded_param``, ``_unsharded_param``, ``_module_info``."""
    return [parameter for group in _groups(part) for parameter in group.fsdp_params]


def is_gathered(part: FSDPModule) -> bool:
    """Whether the module holds whole parameters now; also for one that has none."""
    return all(group.is_unsharded for group in _groups(part))


def compute_dtypes(part: FSDPModule) -> set[torch.dtype]:
    """In which dtypes the parameters of ``part`` take part in a step."""
    chosen = policy(part).param_dtype
    return {chosen or p.sharded_param.dtype for p in parameters_of(part)}


def policy(part: FSDPModule) -> Any:
    """Its ``MixedPrecisionPolicy``."""
    return _state(part)._mp_policy


def begin_as_root(part: FSDPModule) -> None:
    """Make ``part`` the root of all that it holds, as its first forward does. Nothing happens if it has run one."""
    _state(part)._lazy_init()


def finish_backward(part: FSDPModule) -> None:
    """Called in a backward: reduce the gradients of every group of the root ``part`` when it is over."""
    _state(part)._register_root_post_backward_final_callback()


def _state(part: FSDPModule) -> Any:
    return part._get_fsdp_state()


def _groups(part: FSDPModule) -> list[Any]:
    state = _state(part)
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    only = state._fsdp_param_group  # torch < 2.12
    return [] if only is None else [only]
