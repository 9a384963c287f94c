"""Collectives that gradients flow through, each with its true adjoint.

What ranks compute alike is counted once by each of them, and what is divided among them comes out as many times too
large as there are ranks: averaging gradients over the ranks then gives those of one process that has it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_liger.sequence import SequenceGroup

_group_of: Any = distributed_c10d._resolve_process_group
# their names since torch 2.13, which warns of the older ones
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sums: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _AllToAll(torch.autograd.Function):
    """Its adjoint is itself, the other way round."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sequence: SequenceGroup, received: list[int], sent: list[int]) -> Tensor:
        ctx.sequence, ctx.splits = sequence, (received, sent)
        made = tensor.new_empty((sum(received), *tensor.shape[1:]))
        dist.all_to_all_single(made, tensor.contiguous(), received, sent, group=sequence.group)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        received, sent = ctx.splits
        return _AllToAll.apply(grads[0], ctx.sequence, sent, received), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sequence: SequenceGroup) -> Tensor:
        ctx.sequence = sequence
        made = tensor.new_empty((tensor.shape[0] * sequence.size, *tensor.shape[1:]))
        _gather_into(made, tensor.contiguous(), group=sequence.group)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _ReduceScatter.apply(grads[0], ctx.sequence), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sequence: SequenceGroup) -> Tensor:
        ctx.sequence = sequence
        made = tensor.new_empty((tensor.shape[0] // sequence.size, *tensor.shape[1:]))
        _scatter_sums(made, tensor.contiguous(), group=sequence.group)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _AllGather.apply(grads[0], ctx.sequence), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sequence: SequenceGroup) -> Tensor:
        ctx.sequence = sequence
        made = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(made, group=sequence.group)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Sum.apply(grads[0], ctx.sequence), None


def all_to_all(tensor: Tensor, sequence: SequenceGroup, received: Sequence[int], sent: Sequence[int]) -> Tensor:
    """Part ``i`` along the first dim goes to rank ``i``; what comes back is in the order of the ranks that sent it.

    Args:
        received, sent: rows of each part.
    """
    made: Tensor = _AllToAll.apply(tensor, sequence, list(received), list(sent))
    return made


def all_gather(tensor: Tensor, sequence: SequenceGroup) -> Tensor:
    """``(size * n, ...)`` of every rank's ``(n, ...)``; gradients of all ranks are summed where they come from."""
    if tensor.dtype == torch.bool:
        return all_gather(tensor.to(torch.uint8), sequence).bool()
    made: Tensor = _AllGather.apply(tensor, sequence)
    return made


@torch.library.custom_op("lightning_liger::exchange", mutates_args=())
def exchange(parts: Tensor, group: str) -> Tensor:
    """:func:`all_to_all` of equal parts; an operator that compiled code keeps as it is.

    Args:
        parts: ``(ranks, ...)``, contiguous. group: name of the process group.
    """
    made = torch.empty_like(parts)
    dist.all_to_all_single(made, parts, group=_group_of(group))
    return made


@exchange.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.lightning_liger.exchange(grad.contiguous(), ctx.group), None


exchange.register_autograd(_back, setup_context=_keep)


def all_sum(tensor: Tensor, sequence: SequenceGroup) -> Tensor:
    """The sum over ranks, on every rank; gradients are summed as well."""
    made: Tensor = _Sum.apply(tensor, sequence)
    return made
