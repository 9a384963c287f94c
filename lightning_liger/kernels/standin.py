"""Stand-ins: an instance of a module's own class that shares no parameter with it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor


def stand_in(
    module: nn.Module,
    parameters: Mapping[str, Tensor | None],
    children: Mapping[str, nn.Module],
    sizes: Mapping[int, int] | None = None,
) -> nn.Module:
    """A shallow copy of ``module`` with other parameters and children, without hooks and without a rebound forward.

    Args:
        parameters: by name; those not given are dropped.
        children: by name; they replace the module's own, other children are kept (activations).
        sizes: integers among the module's attributes that name a size, and what they are now.
    """
    made: Any = module.__class__.__new__(module.__class__)
    for name, value in vars(module).items():
        if name in ("forward", "_parameters", "_modules", "_buffers") or name.endswith("_hooks"):
            continue
        if sizes and isinstance(value, int) and not isinstance(value, bool):
            value = sizes.get(value, value)
        made.__dict__[name] = value
    hooks = [name for name in vars(module) if name.endswith("_hooks")]
    for name in hooks:
        made.__dict__[name] = OrderedDict() if isinstance(vars(module)[name], Mapping) else vars(module)[name]
    made.__dict__["_parameters"] = {k: None if p is None else nn.Parameter(p) for k, p in parameters.items()}
    made.__dict__["_buffers"] = dict(module._buffers)
    made.__dict__["_modules"] = {**module._modules, **children}
    made.__dict__["_non_persistent_buffers_set"] = set()
    return made


def tiny_linear(like: nn.Module, n_in: int, n_out: int, device: torch.device) -> nn.Linear:
    """A random linear layer, with a bias where ``like`` has one."""
    # made on the CPU: the numbers must not come from a generator of the device
    made = nn.Linear(n_in, n_out, bias=getattr(like, "bias", None) is not None, dtype=torch.float32, device="cpu")
    return made.to(device)


def rows(scales: tuple[float, ...], width: int, device: torch.device) -> Tensor:
    """Random rows ``(2, len(scales), width)`` of very different size: a clamp, or an epsilon, shows in some of them."""
    x = torch.randn(2, len(scales), width) * torch.tensor(scales)[None, :, None]
    return x.to(device).requires_grad_()


def features(module: nn.Module) -> tuple[int, int] | None:
    """``(in, out)`` of a layer that maps vectors linearly (plain, quantised, or wrapped by an adapter), else None."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        sizes = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(s, int) for s in sizes):
            return sizes  # type: ignore[return-value]
    inner = getattr(module, "linear", None)
    return features(inner) if isinstance(inner, nn.Module) and inner is not module else None


def defined_by(module: nn.Module) -> Any:
    """The class that the user's code made: below what ``fully_shard`` and the like derive from it."""
    for klass in type(module).__mro__:
        if "forward" in vars(klass):
            return klass
    return type(module)
