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

from lightning_liger.sequence import SequenceGroup

# their names since torch 2.13, which warns of the older ones
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sums: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _AllToAll(torch.autograd.Function):
    """Its adjoint is itself, the other way round."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, sequence: SequenceGroup, received: list[int] | None, sent: list[int] | None
    ) -> Tensor:
        ctx.sequence, ctx.splits = sequence, (received, sent)
        length = tensor.shape[0] if received is None else sum(received)
        made = tensor.new_empty((length, *tensor.shape[1:]))
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


def all_to_all(
    tensor: Tensor, sequence: SequenceGroup, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
) -> Tensor:
    """Part ``i`` along the first dim goes to rank ``i``; what comes back is in the order of the ranks that sent it.

    Args:
        received, sent: rows of each part; equal parts if they are not given.
    """
    made: Tensor = _AllToAll.apply(
        tensor, sequence, None if received is None else list(received), None if sent is None else list(sent)
    )
    return made


def all_gather(tensor: Tensor, sequence: SequenceGroup) -> Tensor:
    """``(size * n, ...)`` of every rank's ``(n, ...)``; gradients of all ranks are summed where they come from."""
    if tensor.dtype == torch.bool:
        return all_gather(tensor.to(torch.uint8), sequence).bool()
    made: Tensor = _AllGather.apply(tensor, sequence)
    return made


def all_sum(tensor: Tensor, sequence: SequenceGroup) -> Tensor:
    """The sum over ranks, on every rank; gradients are summed as well."""
    made: Tensor = _Sum.apply(tensor, sequence)
    return made
