"""Shape operators: the ragged dimensions keep their names, the others are reshaped in the rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_liger.padding.plain_decoder.dispatch import handles, named
from lightning_liger.padding.plain_decoder.ragged import RaggedTensor, Unpackable, rows_of, wrap
from lightning_liger.padding.plain_decoder.rowwise import place_of, without

T = Tensor


def viewed(tensor: RaggedTensor, data: Tensor, batch: int, seq: int) -> RaggedTensor:
    made = wrap(data, tensor.packing, batch, seq)
    tensor.shared = made.shared = True
    return made


def sizes_of(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> list[int]:
    given = args or (kwargs[name],)
    return list(given[0] if isinstance(given[0], (tuple, list)) else given)


@handles(*named("view reshape", T), torch.reshape)
def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    if (rest and isinstance(rest[0], torch.dtype)) or "dtype" in kwargs:
        return NotImplemented
    return reshaped(tensor, sizes_of(tuple(rest), kwargs, "size" if "size" in kwargs else "shape"))


def reshaped(tensor: RaggedTensor, sizes: list[int]) -> Any:
    """``tensor.view(sizes)``: tokens must stay under two dimensions of their own, or under one of both together."""
    old = list(tensor.shape)
    total = math.prod(old)
    known = math.prod(s for s in sizes if s != -1)
    new = [total // max(known, 1) if s == -1 else int(s) for s in sizes]
    if math.prod(new) != total:
        raise RuntimeError(f"shape {sizes} is invalid for a tensor of shape {tuple(old)}")
    rows, length = tensor.packing.layout.shape

    def find(size: int, before: int, taken: int = -1) -> int:
        found = (i for i, s in enumerate(new) if i != taken and s == size and math.prod(new[:i]) == before)
        return next(found, -1)

    before = math.prod(old[: tensor.batch])
    if tensor.batch == tensor.seq:
        batch = seq = find(rows * length, before)
        if batch < 0:
            batch = find(rows, before)
            seq = batch + 1
            if batch < 0 or seq >= len(new) or new[seq] != length:
                batch = seq = -1
    else:
        batch = find(rows, before)
        seq = find(length, math.prod(old[: tensor.seq]), batch)
        if batch < 0 or seq < 0:
            batch = seq = find(rows * length, before) if tensor.seq == tensor.batch + 1 else -1
    if batch < 0:
        raise Unpackable(f"a view of {tuple(old)} as {tuple(new)}, which mixes tokens with other dimensions")
    others = [s for i, s in enumerate(new) if i not in (batch, seq)]
    data = rows_of(tensor)
    return viewed(tensor, data.reshape(data.shape[0], *others), batch, seq)


@handles(torch.flatten, T.flatten)
def _flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, start, end = (*args, *(kwargs.get("start_dim", 0), kwargs.get("end_dim", -1))[len(args) - 1 :])
    shape, n = list(tensor.shape), tensor.dim()
    start, end = start % n, end % n
    return reshaped(tensor, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


@handles(torch.unflatten, T.unflatten)
def _unflatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    sizes = list(args[2] if len(args) > 2 else kwargs["sizes"])
    shape, dim = list(tensor.shape), dim % tensor.dim()
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return reshaped(tensor, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def permuted(tensor: RaggedTensor, order: list[int]) -> RaggedTensor:
    order = [d % tensor.dim() for d in order]
    data = rows_of(tensor)
    others = [place_of(tensor, d) for d in order if d not in (tensor.batch, tensor.seq)]
    if others != sorted(others):
        data = data.permute(0, *others)
    return viewed(tensor, data, order.index(tensor.batch), order.index(tensor.seq))


@handles(torch.permute, T.permute)
def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return permuted(args[0], sizes_of(args[1:], kwargs, "dims"))


@handles(*named("transpose swapaxes swapdims", torch, T))
def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, a, b = (*args, *kwargs.values())
    order = list(range(tensor.dim()))
    order[a], order[b] = order[b], order[a]
    return permuted(tensor, order)


@handles(T.mT.__get__, T.T.__get__)  # type: ignore[attr-defined]
def _turned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = list(range(args[0].dim()))
    if len(order) < 2 or (len(order) > 2 and func == T.T.__get__):  # type: ignore[attr-defined]
        return NotImplemented
    return permuted(args[0], [*order[:-2], order[-1], order[-2]])


@handles(torch.movedim, T.movedim, torch.moveaxis, T.moveaxis)
def _movedim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, source, target = (*args, *kwargs.values())
    n = tensor.dim()
    sources = [s % n for s in (source if isinstance(source, (tuple, list)) else (source,))]
    targets = [t % n for t in (target if isinstance(target, (tuple, list)) else (target,))]
    rest = iter(d for d in range(n) if d not in sources)
    moved = dict(zip(targets, sources, strict=True))
    return permuted(tensor, [moved[i] if i in moved else next(rest) for i in range(n)])


@handles(torch.unsqueeze, T.unsqueeze)
def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim = (*args, *kwargs.values())
    return _indexed(tensor, _at(tensor, dim % (tensor.dim() + 1), None))


@handles(torch.squeeze, T.squeeze)
def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    ragged = (tensor.batch, tensor.seq)
    if given is None:
        dims = [d for d, s in enumerate(tensor.shape) if s == 1]
        if any(d in ragged for d in dims):
            raise Unpackable("squeeze of a batch of one row, or of one token")
    else:
        dims = [d % tensor.dim() for d in (given if isinstance(given, (tuple, list)) else (given,))]
        dims = [d for d in dims if tensor.shape[d] == 1]
    index: list[Any] = [0 if d in dims else slice(None) for d in range(tensor.dim())]
    return _indexed(tensor, index)


@handles(torch.select, T.select)
def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, index = (*args, *kwargs.values())
    position: list[Any] = [slice(None)] * tensor.dim()
    position[dim] = index
    return _indexed(tensor, position)


@handles(torch.narrow, T.narrow)
def _narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, start, length = (*args, *kwargs.values())
    position: list[Any] = [slice(None)] * tensor.dim()
    position[dim] = slice(start, start + length)
    return _indexed(tensor, position)


def _at(tensor: RaggedTensor, dim: int, value: Any) -> list[Any]:
    index: list[Any] = [slice(None)] * tensor.dim()
    index.insert(dim, value)
    return index


@handles(T.__getitem__)
def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, given = args
    if not isinstance(tensor, RaggedTensor):
        return NotImplemented
    index = list(given) if isinstance(given, tuple) else [given]
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index):
        return NotImplemented
    taken = sum(i is not None and i is not Ellipsis for i in index)
    full: list[Any] = [slice(None)] * (tensor.dim() - taken)
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index[place : place + 1] = full
    else:
        index += full
    return _indexed(tensor, index)


def _indexed(tensor: RaggedTensor, index: list[Any]) -> Any:
    """``tensor[index]``, one entry for each dimension and None for each new one."""
    dim, place = 0, 0
    batch = seq = -1
    others: list[Any] = []
    for entry in index:
        if entry is None:
            others.append(None)
            place += 1
            continue
        if dim in (tensor.batch, tensor.seq):
            whole = isinstance(entry, slice) and entry.indices(tensor.shape[dim]) == (0, tensor.shape[dim], 1)
            if not whole:
                return NotImplemented
            batch = place if dim == tensor.batch else batch
            seq = place if dim == tensor.seq else seq
        else:
            others.append(entry)
        dim += 1
        place += not isinstance(entry, int)
    return viewed(tensor, rows_of(tensor)[(slice(None), *others)], batch, seq)


@handles(*named("split chunk tensor_split split_with_sizes", torch, T))
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, parts, *rest = (*args, *(v for k, v in kwargs.items() if k != "dim"))
    dim = place_of(tensor, rest[0] if rest else kwargs.get("dim", 0))
    return tuple(viewed(tensor, d, tensor.batch, tensor.seq) for d in func(rows_of(tensor), parts, dim=dim))


@handles(torch.unbind, T.unbind)
def _unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    place, gone = place_of(tensor, dim), [dim % tensor.dim()]
    parts = rows_of(tensor).unbind(place)
    return tuple(viewed(tensor, d, without(tensor.batch, gone), without(tensor.seq, gone)) for d in parts)


@handles(T.__iter__)
def _iterate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return iter(_unbind(func, args, {}))


@handles(torch.view_as_complex, torch.view_as_real)
def _complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if func is torch.view_as_complex and tensor.dim() - 1 in (tensor.batch, tensor.seq):
        return NotImplemented
    return viewed(tensor, func(rows_of(tensor)), tensor.batch, tensor.seq)


@handles(T.contiguous)
def _contiguous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows are not copied: whether the padded tensor would have been one block says nothing about them."""
    tensor = args[0]
    data = rows_of(tensor)
    return viewed(tensor, data.contiguous(), tensor.batch, tensor.seq)


@handles(T.clone, torch.clone)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    return wrap(rows_of(tensor).clone(), tensor.packing, tensor.batch, tensor.seq)


@handles(T.detach, torch.detach, T.data.__get__)  # type: ignore[attr-defined]
def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    made = RaggedTensor(tensor.data_.detach(), tensor.packing, tensor.batch, tensor.seq)
    tensor.shared = made.shared = True
    return made
