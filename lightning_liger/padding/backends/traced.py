"""Attention over documents in code that is being compiled: what is traced must hold for the next batch, too.

Shapes are constants of compiled code, so that a batch is described by its boundaries ``cu_seqlens``, a tensor like any
other, and by the longest document, a number that must not change from batch to batch. Kernels without an operator of
their own, which a compiler would trace into, get one here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_liger.padding.backends.documents import by_torch, in_reach, plain
from lightning_liger.padding.backends.features import Features
from lightning_liger.padding.backends.registry import BACKENDS, Backend
from lightning_liger.parallel.ulysses import heads_for_tokens, own_heads, tokens_for_heads
from lightning_liger.sequence import SequenceGroup

_NOTHING = torch.empty(1)
_RUNS = {backend.name: backend.run for backend in BACKENDS}


@dataclass
class Boundaries:
    """What a kernel asks of a layout, made of the boundaries alone.

    Attributes:
        cu_seqlens: int32 ``(documents + 1,)``.
        longest: tokens that no document is longer than.
    """

    cu_seqlens: Tensor
    longest: int

    def on(self, device: torch.device) -> Boundaries:
        return self


@dataclass
class TracedCall:
    """Stands for a packed call among the keywords of a block that is compiled.

    How many documents there are and how long the longest may be are sizes of tensors here, which compiled code can be
    told to take as they come.

    Attributes:
        cu_seqlens: int32 ``(documents + 1,)``.
        room: ``(longest,)``; its values mean nothing.
        backend: name of the attention backend.
        ranks, rank, group: among whom tokens are divided, see :class:`SequenceGroup`.
    """

    cu_seqlens: Tensor
    room: Tensor
    backend: str
    ranks: int = 1
    rank: int = 0
    group: str = ""

    @staticmethod
    def of(cu_seqlens: Tensor, longest: int, backend: str, sequence: SequenceGroup | None = None) -> TracedCall:
        """With both sizes left open."""
        room = _NOTHING.expand(longest)
        for tensor in (cu_seqlens, room):
            torch._dynamo.mark_dynamic(tensor, 0)
        if sequence is None:
            return TracedCall(cu_seqlens, room, backend)
        return TracedCall(cu_seqlens, room, backend, sequence.size, sequence.rank, sequence.name)

    @property
    def longest(self) -> int:
        return self.room.shape[0]


def why_not_traced(backend: Backend, features: Features) -> str:
    """Why compiled code cannot hold this layer's attention, or ``""``."""
    if backend.name == "flex":
        return "FlexAttention makes a mask for each batch, outside of compiled code"
    if backend.name == "fa4":
        return "FlashAttention 4 is no operator of torch"
    if backend.run is not None:
        return ""
    if features.device != "cpu":
        return "its attention runs once per document"
    if features.dropout or not plain(features):
        return "its attention runs once per document, by the model's own function"
    return ""


def traced_attention(
    call: TracedCall, query: Tensor, key: Tensor, value: Tensor, causal: bool, arguments: dict[str, Any]
) -> Tensor:
    """``(T, heads, size)`` of ``(1, heads, T, size)`` tensors, in operators that a compiler keeps as they are."""
    if call.ranks == 1:
        return _attention(call, query, key, value, causal, arguments, arguments.get("s_aux"))
    heads, sinks = query.shape[1], arguments.get("s_aux")
    query, key, value = heads_for_tokens(query, key, value, call.ranks, call.group)
    sinks = None if sinks is None else own_heads(sinks, heads, call.ranks, call.rank)
    return tokens_for_heads(_attention(call, query, key, value, causal, arguments, sinks), call.ranks, call.group)


def _attention(
    call: TracedCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    arguments: dict[str, Any],
    sinks: Tensor | None,
) -> Tensor:
    window, scale = arguments.get("sliding_window"), arguments.get("scaling")
    softcap, dropout = arguments.get("softcap"), arguments.get("dropout")
    if window is not None and window >= call.longest:
        window = None
    if call.backend == "sdpa":
        return torch.ops.lightning_liger.each_document(query, key, value, call.cu_seqlens, causal, window, scale)
    features = _features(
        query,
        key,
        value,
        causal=causal,
        window=window,
        softcap=softcap or None,
        sinks=sinks is not None,
        dropout=dropout or 0.0,
        scale=scale,
    )
    run = _RUNS[call.backend]
    assert run is not None
    return run(query, key, value, Boundaries(call.cu_seqlens, call.longest), features, sinks)  # type: ignore[arg-type]


def _features(query: Tensor, key: Tensor, value: Tensor, **asked: Any) -> Features:
    """Of ``(1, heads, T, size)`` tensors; unlike :meth:`Features.of` a compiler can trace it."""
    sizes = query.shape[-1], value.shape[-1], query.shape[1], key.shape[1]
    return Features(query.device.type, query.dtype, *sizes, **asked)


# -- attention of torch, document by document ----------------------------------------------------------------------------


@dataclass
class _Documents:
    lengths: tuple[int, ...]

    @property
    def documents(self) -> tuple[int, ...]:
        return self.lengths


def _each_document(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, window: int | None, scale: float | None
) -> Tensor:
    features = _features(q, k, v, causal=causal, window=window, scale=scale)
    documents = _Documents(tuple(int(n) for n in cu_seqlens.diff().tolist()))
    return by_torch(q, k, v, documents, features)  # type: ignore[arg-type]


@torch.library.custom_op("lightning_liger::each_document", mutates_args=())
def each_document(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, window: int | None, scale: float | None
) -> Tensor:
    """Causal or full attention inside each document, CPU."""
    return _each_document(q, k, v, cu_seqlens, causal, window, scale)


@each_document.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, window: Any, scale: Any) -> Tensor:
    return q.new_empty((q.shape[2], q.shape[1], v.shape[3]))


@torch.library.custom_op("lightning_liger::each_document_backward", mutates_args=())
def each_document_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, written out: with ``P = softmax(s)``, ``ds = P (dP - rowsum(dP P))``."""
    groups, factor = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    found = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    ends = cu_seqlens.tolist()
    for part in (slice(a, b) for a, b in itertools.pairwise(ends)):
        query, gradient = q[0, :, part].float(), grad[part].transpose(0, 1).float()
        key, value = (t[0, :, part].repeat_interleave(groups, 0).float() for t in (k, v))
        scores = query @ key.mT * factor
        hidden = ~in_reach(scores.shape[-1], causal, window, q.device)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        d_weights = gradient @ value.mT
        d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * factor
        found[0][0, :, part] = (d_scores @ key).to(q.dtype)
        for into, made in ((found[1], d_scores.mT @ query), (found[2], weights.mT @ gradient)):
            into[0, :, part] = made.unflatten(0, (-1, groups)).sum(1).to(into.dtype)
    return found[0], found[1], found[2]


@each_document_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, cu_seqlens, *options = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens)
    ctx.options = options


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    found = torch.ops.lightning_liger.each_document_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*found, None, None, None, None)


each_document.register_autograd(_gradients, setup_context=_keep)
