"""Optimizers over sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer


def use_fused(optimizer: Optimizer) -> bool:
    """Let Adam and AdamW update in one kernel, where their author left the choice of implementation open.

    The formula is the same; only the order of roundings differs from PyTorch's own choice (``foreach``).
    """
    if type(optimizer) not in (Adam, AdamW) or optimizer.state:
        return False
    groups = optimizer.param_groups
    open_choice = all(g.get("foreach") is None and g.get("fused") is None for g in groups)
    special = any(g.get("capturable") or g.get("differentiable") for g in groups)
    parameters = [p for g in groups for p in g["params"]]
    fits = all(p.device.type == "cuda" and p.is_floating_point() for p in parameters)
    if not open_choice or special or not fits or not parameters:
        return False
    optimizer.defaults["fused"] = True
    for group in groups:
        group["fused"] = True
    return True


def no_mixed_lists(optimizer: Optimizer) -> None:
    """Update parameter by parameter where sharded and whole ones stand in one group: one kernel cannot take both."""
    from torch.distributed.tensor import DTensor

    for group in optimizer.param_groups:
        kinds = {isinstance(p, DTensor) for p in group["params"]}
        if len(kinds) > 1 and "foreach" in group:
            group["foreach"] = False
            if "fused" in group:
                group["fused"] = False


def replace_stale(optimizers: Iterable[Optimizer], current: Mapping[int, torch.nn.Parameter]) -> int:
    """Put the sharded parameter in place of the whole one that it was made of.

    Code that collects parameters before the module is sharded (``self.groups = [...]`` in ``__init__``) would train
    tensors that are no part of the module any more.

    Args:
        current: id of a parameter before sharding -> what it is now.

    Returns:
        how many were replaced.
    """
    replaced = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters: list[Any] = group["params"]
            for i, parameter in enumerate(parameters):
                new = current.get(id(parameter))
                if new is not None and new is not parameter:
                    parameters[i] = new
                    replaced += 1
    return replaced


def move_to(optimizer: Optimizer, replaced: Mapping[torch.nn.Parameter, torch.nn.Parameter]) -> None:
    """Let ``optimizer`` go on with other parameters, and with its state for them made whole. A collective."""
    from torch.distributed.tensor import DTensor

    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
            optimizer.state[new] = {k: v.to(new.device) if isinstance(v, Tensor) else v for k, v in whole.items()}
