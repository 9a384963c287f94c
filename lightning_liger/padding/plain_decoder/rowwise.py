"""Functions along a token's own dimensions: linear layers, norms, reductions, products with a matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.padding.plain_decoder.dispatch import HANDLERS, handles, name_of, named
from lightning_liger.padding.plain_decoder.pointwise import read_dense
from lightning_liger.padding.plain_decoder.ragged import RaggedTensor, Unpackable, rows_of, wrap

T = Tensor

_REDUCTIONS = "sum mean prod all any amax amin logsumexp argmax argmin max min var std cumsum cumprod softmax "
_REDUCTIONS += "log_softmax softmin flip"
# Functions along dimensions: where ``dim`` stands among the arguments, and its default.
_ALONG: dict[str, tuple[int, Any]] = dict.fromkeys(_REDUCTIONS.split(), (1, None))
_ALONG |= {"sort": (1, -1), "argsort": (1, -1), "topk": (2, -1), "norm": (2, None), "roll": (2, None)}

# What may follow ``dim`` by position, where that is not ``keepdim``.
_AFTER: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "normalize", "glu", "flip", "roll"), ()
)
_AFTER |= {"topk": ("largest", "sorted"), "sort": ("descending",), "argsort": ("descending",)}
_AFTER |= {"norm": ("keepdim", "dtype"), "var": ("unbiased", "keepdim"), "std": ("unbiased", "keepdim")}


def place_of(tensor: RaggedTensor, dim: int) -> int:
    """Where a logical dimension stands in the rows.

    Raises:
        Unpackable: it is one of the ragged ones.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"dimension {dim} of a tensor with {tensor.dim()} dimensions")
    dim %= tensor.dim()
    if dim in (tensor.batch, tensor.seq):
        raise Unpackable("tokens are mixed with one another, or counted, by a function along the sequence or batch")
    return 1 + dim - sum(ragged < dim for ragged in {tensor.batch, tensor.seq})


def without(place: int, dims: list[int]) -> int:
    """Where a ragged dimension stands when other logical dimensions are gone."""
    return place - sum(dim < place for dim in dims)


def _along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at: int, default: Any) -> Any:
    tensor, *rest = args
    if not isinstance(tensor, RaggedTensor) or kwargs.get("out") is not None:
        return NotImplemented
    if any(isinstance(a, Tensor) for a in rest):
        return HANDLERS[torch.maximum](func, args, kwargs) if name_of(func) in ("max", "min") else NotImplemented
    given = kwargs.pop("dim", kwargs.pop("axis", kwargs.pop("dims", rest[at - 1] if len(rest) >= at else default)))
    if given is None:
        raise Unpackable(f"{name_of(func)} over all tokens")
    if isinstance(given, (tuple, list)) and not given:
        raise Unpackable(f"{name_of(func)} over all tokens")
    dims = [d % tensor.dim() for d in (given if isinstance(given, (tuple, list)) else (given,))]
    places = [place_of(tensor, d) for d in (given if isinstance(given, (tuple, list)) else (given,))]
    name = "dims" if name_of(func) in ("flip", "roll") else "dim"
    kwargs[name] = places if isinstance(given, (tuple, list)) or name == "dims" else places[0]
    before, after = rest[: at - 1], rest[at:]
    rows = rows_of(tensor)
    if after:  # keepdim, or what follows dim in softmax
        names = _AFTER.get(name_of(func), ("keepdim",))
        if len(after) > len(names):
            return NotImplemented
        kwargs.update(zip(names, after, strict=False))
    result = func(rows, *before, **kwargs)

    def back(value: Tensor) -> RaggedTensor:
        gone = dims if value.dim() < rows.dim() else []
        return wrap(value, tensor.packing, without(tensor.batch, gone), without(tensor.seq, gone))

    if isinstance(result, Tensor):
        return back(result)
    return type(result)([back(v) for v in result])  # a tuple with names


class _Along:
    """A handler that knows where ``dim`` stands."""

    def __init__(self, at: int, default: Any) -> None:
        self.at, self.default = at, default

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _along(func, args, dict(kwargs), self.at, self.default)


for _name, (_at, _default) in _ALONG.items():
    handles(*named(_name, torch, T, F, torch.special))(_Along(_at, _default))
handles(F.normalize)(_Along(2, 1))
handles(F.glu)(_Along(1, -1))
handles(torch.linalg.vector_norm, torch.linalg.norm)(_Along(2, None))


def _ends(tensor: RaggedTensor, dims: int) -> bool:
    """Whether the last ``dims`` dimensions belong to single tokens."""
    return max(tensor.batch, tensor.seq) < tensor.dim() - dims


@handles(F.linear)
def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    if not isinstance(tensor, RaggedTensor) or not _ends(tensor, 1):
        return NotImplemented
    if any(isinstance(a, RaggedTensor) for a in (*rest, *kwargs.values())):
        return NotImplemented
    return wrap(func(rows_of(tensor), *rest, **kwargs), tensor.packing, tensor.batch, tensor.seq)


@handles(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    shape = rest[0] if rest else kwargs.get("normalized_shape", ())
    if not isinstance(tensor, RaggedTensor) or not _ends(tensor, 1 if isinstance(shape, int) else len(shape)):
        return NotImplemented
    return wrap(func(rows_of(tensor), *rest, **kwargs), tensor.packing, tensor.batch, tensor.seq)


@handles(*named("matmul mm __matmul__", torch, T))
def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    left, right = args
    if isinstance(left, RaggedTensor) and isinstance(right, RaggedTensor):
        raise Unpackable("attention is computed by a matrix product of its own, not by scaled_dot_product_attention")
    if isinstance(right, RaggedTensor) or right.dim() != 2 or not _ends(left, 1):
        return NotImplemented
    return wrap(torch.matmul(rows_of(left), right), left.packing, left.batch, left.seq)


@handles(torch.bmm, T.bmm, torch.baddbmm, T.baddbmm)
def _bmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise Unpackable("attention is computed by a matrix product of its own, not by scaled_dot_product_attention")


@handles(torch.addmm)
def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``addmm(bias, x.view(-1, H), weight)``."""
    if len(args) != 3 or isinstance(args[0], RaggedTensor) or isinstance(args[2], RaggedTensor):
        return NotImplemented
    bias, tensor, weight = args
    if tensor.batch != 0 or tensor.seq != 0 or bias.dim() > 1:
        return NotImplemented
    return wrap(func(bias, rows_of(tensor), weight, **kwargs), tensor.packing, 0, 0)


@handles(torch.einsum)
def _einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where every ragged operand and the result have their tokens under the same two letters."""
    equation, *operands = args
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if kwargs or not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    first = next((t, o) for t, o in zip(terms, operands, strict=True) if isinstance(o, RaggedTensor))
    batch, seq = first[0][first[1].batch], first[0][first[1].seq]
    if batch not in output or seq not in output:
        raise Unpackable("attention, or a sum over tokens, is computed by einsum")
    packing = first[1].packing
    made, tensors = [], []
    for term, operand in zip(terms, operands, strict=True):
        others = term.replace(batch, "").replace(seq, "")
        if isinstance(operand, RaggedTensor):
            if (term[operand.batch], term[operand.seq]) != (batch, seq):
                raise Unpackable("attention is computed by einsum")
            tensors.append(rows_of(operand))
        elif batch in term or seq in term:
            if not (batch in term and seq in term):
                return NotImplemented
            tensors.append(read_dense(operand, packing, operand.dim(), term.index(batch), term.index(seq)))
        else:
            tensors.append(operand)
            made.append(term)
            continue
        made.append(batch + others)
    others = output.replace(batch, "").replace(seq, "")
    result = torch.einsum(f"{','.join(made)}->{batch}{others}", *tensors)
    return wrap(result, packing, output.index(batch), output.index(seq))
