"""Gradient clipping over gradients that lie in pieces on several ranks, beside gradients that are whole on each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
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
    for (device, dtype), locals_ in _alike(grads).items():
        torch._foreach_mul_(locals_, factor.to(device, dtype))
    return norm


@torch.no_grad()
def clip_grad_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp each entry of each gradient to ``[-clip_value, clip_value]``."""
    for locals_ in _alike(p.grad for p in parameters if p.grad is not None).values():
        torch._foreach_clamp_min_(locals_, -clip_value)
        torch._foreach_clamp_max_(locals_, clip_value)


@torch.no_grad()
def grad_norm(module: nn.Module, norm_type: float | str = 2.0, group_separator: str = "/") -> dict[str, float]:
    """``lightning.pytorch.utilities.grad_norm`` for gradients in pieces: the same names, whole norms. A collective.

    Returns:
        ``grad_<p>_norm/<parameter>`` for each parameter with a gradient, and ``grad_<p>_norm_total``.
    """
    p = float(norm_type)
    if p <= 0:
        raise ValueError(f"norm_type={norm_type!r}: expected a positive number or 'inf'.")
    named = [(n, q.grad) for n, q in module.named_parameters() if q.grad is not None]
    if not named:
        return {}
    norms = each_norm([g for _, g in named], p)
    values = {f"grad_{p}_norm{group_separator}{n}": v for (n, _), v in zip(named, norms.tolist(), strict=True)}
    return {**values, f"grad_{p}_norm_total": float(torch.linalg.vector_norm(norms, p))}


@torch.no_grad()
def global_norm(grads: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The ``p``-norm of all gradients as if none were sharded: fp32, ``()``; zero for no gradients. A collective.

    One all-reduce of one number for each arrangement of ranks and each of its dimensions that shards.
    """
    infinite = norm_type == float("inf")
    arranged: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    grads = list(grads)
    for grad in grads:
        arranged.setdefault(_sharded_over(grad), []).append(_local(grad))
    device = _device_of(grads)
    found = []
    for (mesh, dimensions), locals_ in arranged.items():
        # a rank may hold no row of a small parameter
        held = [g for g in locals_ if g.numel()]
        norms = torch._foreach_norm(held, norm_type, dtype=torch.float32) if held else []
        whole = torch.stack([n.to(device) for n in norms] or [torch.zeros((), device=device)])
        power = torch.linalg.vector_norm(whole, norm_type, dtype=torch.float32)
        power = power if infinite else power.pow(norm_type)
        for dimension in dimensions:
            assert mesh is not None
            operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
            dist.all_reduce(power, operation, group=mesh.get_group(dimension))
        found.append(power)
    if not found:
        return torch.zeros((), dtype=torch.float32)
    together = torch.stack(found)
    return together.max() if infinite else together.sum().pow(1.0 / norm_type)


@torch.no_grad()
def each_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The ``p``-norm of each gradient as if it were not sharded: fp32, ``(len(grads),)``.

    One small all-reduce for each arrangement of ranks and each of its dimensions that shards.
    """
    infinite = norm_type == float("inf")
    grouped: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[int]] = {}
    for i, grad in enumerate(grads):
        grouped.setdefault(_sharded_over(grad), []).append(i)
    found = torch.zeros(len(grads), device=_device_of(grads))
    for (mesh, dimensions), places in grouped.items():
        # a rank may hold no row of a small parameter
        held = [i for i in places if _local(grads[i]).numel()]
        powers = torch.zeros(len(grads), device=found.device)
        if held:
            norms = torch._foreach_norm([_local(grads[i]) for i in held], norm_type, dtype=torch.float32)
            norm = torch.stack([n.to(found.device) for n in norms])
            powers[held] = norm if infinite else norm.pow(norm_type)
        for dimension in dimensions:
            assert mesh is not None
            operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
            dist.all_reduce(powers, operation, group=mesh.get_group(dimension))
        found[places] = (powers if infinite else powers.pow(1.0 / norm_type))[places]
    return found


def _device_of(grads: Sequence[Tensor]) -> torch.device:
    """Where norms of all of them can be put together, and collectives run."""
    meshes = [torch.device(g.device_mesh.device_type) for g in grads if isinstance(g, DTensor)]
    return next(iter(meshes), grads[0].device if grads else torch.device("cpu"))


def _alike(grads: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """What each rank holds, in lists that one kernel can take."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for local in map(_local, grads):
        lists.setdefault((local.device, local.dtype), []).append(local)
    return lists


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_over(grad: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    if not isinstance(grad, DTensor):
        return None, ()
    dimensions = tuple(i for i, placement in enumerate(grad.placements) if placement.is_shard())
    return grad.device_mesh, dimensions
