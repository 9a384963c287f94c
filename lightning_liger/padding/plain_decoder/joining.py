"""Several tensors as one, and one several times over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_liger.padding.plain_decoder.dispatch import handles, named
from lightning_liger.padding.plain_decoder.pointwise import read_dense
from lightning_liger.padding.plain_decoder.ragged import RaggedTensor, Unpackable, rows_of, wrap
from lightning_liger.padding.plain_decoder.rowwise import place_of
from lightning_liger.padding.plain_decoder.views import sizes_of, viewed

T = Tensor


@handles(*named("cat concat concatenate stack", torch))
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    if kwargs.get("out") is not None:
        return NotImplemented
    first = next(t for t in tensors if isinstance(t, RaggedTensor))
    stacks = func is torch.stack
    n = first.dim() + stacks
    dim %= n
    batch, seq = (p + (stacks and dim <= p) for p in (first.batch, first.seq))
    place = place_of(first, dim) if not stacks else 1 + dim - sum(p < dim for p in {batch, seq})
    parts = []
    for tensor in tensors:
        if isinstance(tensor, RaggedTensor):
            if (tensor.batch, tensor.seq, tensor.dim()) != (first.batch, first.seq, first.dim()):
                return NotImplemented
            parts.append(rows_of(tensor))
        else:
            if tensor.dim() != first.dim():
                return NotImplemented
            part = read_dense(tensor, first.packing, first.dim(), first.batch, first.seq)
            if part.shape[0] != first.packing.layout.tokens:
                return NotImplemented
            parts.append(part)
    return wrap((torch.stack if stacks else torch.cat)(parts, place), first.packing, batch, seq)


@handles(torch.broadcast_to, T.broadcast_to, T.expand)
def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    sizes = sizes_of(args[1:], {}, "size") if len(args) > 1 else list(kwargs["size"])
    new = len(sizes) - tensor.dim()
    for place in (tensor.batch, tensor.seq):
        if sizes[new + place] not in (-1, tensor.shape[place]):
            raise Unpackable("expand of a batch of one row")
    data = rows_of(tensor)[(slice(None), *(None,) * new)]
    others = [s for i, s in enumerate(sizes) if i - new not in (tensor.batch, tensor.seq)]
    return viewed(tensor, data.expand(data.shape[0], *others), tensor.batch + new, tensor.seq + new)


@handles(torch.repeat_interleave, T.repeat_interleave)
def _repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(repeats, int) or dim is None:
        return NotImplemented
    data = rows_of(tensor).repeat_interleave(repeats, dim=place_of(tensor, dim))
    return wrap(data, tensor.packing, tensor.batch, tensor.seq)


@handles(T.repeat, T.tile, torch.tile)
def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, sizes = args[0], sizes_of(args[1:], kwargs, "repeats")
    if len(sizes) != tensor.dim() or sizes[tensor.batch] != 1 or sizes[tensor.seq] != 1:
        return NotImplemented
    others = [s for i, s in enumerate(sizes) if i not in (tensor.batch, tensor.seq)]
    return wrap(rows_of(tensor).repeat(1, *others), tensor.packing, tensor.batch, tensor.seq)
