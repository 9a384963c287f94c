"""Gradient clipping over gradients that lie in pieces on several ranks, beside gradients that are whole on each."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for any mixture of sharded and plain parameters.

    Args:
        parameters: what the optimizer updates; those without a gradient are passed over.
        max_norm: gradients are scaled to this norm if theirs is larger.
        norm_type: ``p`` of the norm; ``inf`` for the largest entry.

    Returns:
        The norm before clipping over all gradients of all ranks: fp32, ``()``, the same on every rank. A collective.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(grads, norm_type)
    # as torch.nn.utils does: the product with a factor of at most one needs no comparison on the host
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in map(_local, grads):
        local.mul_(factor.to(local.device, local.dtype))
    return norm


def clip_grad_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp each entry of each gradient to ``[-clip_value, clip_value]``."""
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).clamp_(-clip_value, clip_value)


@torch.no_grad()
def global_norm(grads: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The ``p``-norm of all gradients as if none were sharded. One small all-reduce for each mesh dimension in use.

    Returns:
        fp32, ``()``; zero for no gradients.
    """
    grouped: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for grad in grads:
        grouped.setdefault(_sharded_over(grad), []).append(_local(grad))
    infinite = norm_type == float("inf")
    totals: list[Tensor] = []
    for (mesh, dimensions), locals_ in grouped.items():
        device = locals_[0].device if mesh is None else torch.device(mesh.device_type)
        held = [g for g in locals_ if g.numel()]  # a rank may hold no row of any small parameter
        norms = torch._foreach_norm(held, norm_type, dtype=torch.float32) if held else ()
        stacked = torch.stack([n.to(device) for n in norms]) if norms else torch.zeros(1, device=device)
        total = stacked.max() if infinite else stacked.pow(norm_type).sum()
        for dimension in dimensions:
            assert mesh is not None
            operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
            dist.all_reduce(total, operation, group=mesh.get_group(dimension))
        totals.append(total)
    if not totals:
        return torch.zeros(())
    together = torch.stack([t.to(totals[0].device) for t in totals])
    return together.max() if infinite else together.sum().pow(1.0 / norm_type)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_over(grad: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    if not isinstance(grad, DTensor):
        return None, ()
    dimensions = tuple(i for i, placement in enumerate(grad.placements) if placement.is_shard())
    return grad.device_mesh, dimensions
