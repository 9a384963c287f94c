"""Attention over packed documents, plugged into transformers for the length of one call.

While a packed call runs, and while one of its layers is recomputed in backward, the attention interface of
transformers holds one extra name, :data:`PACKED`. Between calls nothing of it is left. The document boundaries travel
in the call's keyword arguments only: whatever is passed out of band is gone when a checkpointed layer is recomputed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.padding.layout import Layout
from lightning_liger.patching import Rebound

PACKED = "liger_packed"
_INSIDE: ContextVar[bool] = ContextVar("lightning_liger_packed_call", default=False)

# What attention functions of transformers understand about one call; anything else that is not None changes the result
# in a way we do not know.
_HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}
_HARMLESS |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "return_dict", "num_items_in_batch"}
_HARMLESS |= {"deterministic", "output_router_logits", "position_embeddings", "cache", "past_key_values", "token_type"}


class PackingError(RuntimeError):
    """A packed call reached code that would have ignored the document boundaries."""


class BackendError(PackingError):
    """The attention backend that the user chose cannot run this model."""


@dataclass(frozen=True)
class PackedCall:
    """What the attention layers of one packed call need to know; passed along as ``packed_call=``."""

    layout: Layout
    attn_implementation: str
    backend: str

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """The keywords that say so, as flash attention in transformers takes them, and this call itself."""
        cu_seqlens, longest = self.layout.on(device).cu_seqlens, max(self.layout.lengths)
        lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        return {**lengths, "max_length_q": longest, "max_length_k": longest, "packed_call": self}


@contextmanager
def packed_attention(config: Any) -> Iterator[None]:
    """Let ``config`` name our attention, and transformers know the name, until the block ends."""
    from transformers.modeling_utils import AttentionInterface

    mapping = AttentionInterface._global_mapping
    before = config._attn_implementation_internal
    known = mapping.get(PACKED)
    mapping[PACKED] = attention_forward
    config._attn_implementation_internal = PACKED
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        if known is None:
            mapping.pop(PACKED, None)


@contextmanager
def inside_packed_call() -> Iterator[None]:
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)


def uses_attention_interface(module: nn.Module) -> bool:
    """Whether the module is a layer that looks its attention function up in the transformers interface."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel) or not hasattr(module, "config"):
        return False
    return any("ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names for function in _own_functions(module))


def _own_functions(module: nn.Module) -> Iterator[Any]:
    """The undecorated methods of the module's class and its bases, below ``nn.Module``."""
    for klass in type(module).__mro__:
        if klass is nn.Module:
            return
        for name, member in vars(klass).items():
            if not name.startswith("__") and inspect.isfunction(member):
                yield inspect.unwrap(member)


class PackedAttention(Rebound):
    """``forward`` of one attention layer: switches the interface over for packed calls, first run or recomputed."""

    by_positions = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if _packed_call(kwargs) is not None:
            return self._packed(args, kwargs)
        if _INSIDE.get() or (self.by_positions and torch._C._current_graph_task_id() != -1):
            raise PackingError(
                f"{type(self.module).__name__} was not handed the document boundaries of the packed batch"
            )
        return self.original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A layer recomputed in backward must stay packed even when the switch went off in between.
        if _packed_call(kwargs) is not None:
            return self._packed(args, kwargs)
        return super().__call__(*args, **kwargs)

    def _packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "packed_call" not in kwargs:
            # the decoder layer names the arguments that it hands on, and these are not among them
            self.by_positions = True
            call = _packed_call(kwargs)
            assert call is not None
            kwargs = {**kwargs, **call.arguments(kwargs["position_ids"].device)}
        with packed_attention(self.module.config):
            return self.original(*args, **kwargs)


def _packed_call(kwargs: dict[str, Any]) -> PackedCall | None:
    """From the keywords, or from the position ids that carry it through layers which drop keywords."""
    given = kwargs.get("packed_call")
    return given if given is not None else getattr(kwargs.get("position_ids"), "packed_call", None)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_call: PackedCall | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention inside each document of a packed batch.

    Args:
        module: the attention layer; ``is_causal`` is read from it unless given.
        query: ``(1, heads, T, head_dim)``; ``key``, ``value``: ``(1, kv_heads, T, head_dim)``.
        attention_mask: ignored by contract: the caller passes none.
        packed_call: the documents. Missing means that the model dropped its keyword arguments.

    Returns:
        ``(1, T, heads, head_dim)`` and None, as transformers expects.

    Raises:
        PackingError: no boundaries, or an argument whose meaning is not known here.
    """
    if packed_call is None:
        raise PackingError(f"{type(module).__name__} does not hand its keyword arguments to the attention function")
    if attention_mask is not None:
        raise PackingError(f"{type(module).__name__} made an attention mask of its own for the packed batch")
    total = packed_call.layout.tokens
    if query.shape[0] != 1 or query.shape[2] != total or key.shape[2] != total:
        raise PackingError(f"{type(module).__name__} attends over another length than the packed batch has")
    if packed_call.attn_implementation.startswith("flash"):
        original = _original_function(module, packed_call)
        return original(module, query, key, value, None, **kwargs)
    if can_use_varlen(module, query, value, packed_call.backend, kwargs):
        return _varlen(module, query, key, value, packed_call.layout, kwargs), None
    if packed_call.backend == "varlen":
        raise BackendError(
            f"attention='varlen' cannot run {type(module).__name__}: it needs CUDA, fp16 or bf16, a head size up to "
            "256, and no dropout, soft-cap or sinks. Use attention='auto'."
        )
    return _per_document(module, query, key, value, packed_call, kwargs), None


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def can_use_varlen(module: nn.Module, query: Tensor, value: Tensor, backend: str, kwargs: dict[str, Any]) -> bool:
    """Whether ``torch.nn.attention.varlen`` computes this layer's attention."""
    if backend == "sdpa" or query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if query.shape[-1] > 256 or query.shape[-1] != value.shape[-1]:
        return False
    allowed = _HARMLESS | {"dropout", "scaling", "is_causal", "sliding_window"}
    return not kwargs.get("dropout") and all(v is None or k in allowed for k, v in kwargs.items())


def _varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, layout: Layout, kwargs: dict[str, Any]
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu = layout.on(query.device).cu_seqlens
    longest = max(layout.lengths)
    causal = _is_causal(module, kwargs)
    window = kwargs.get("sliding_window")
    # transformers' window counts the token itself, flash windows do not
    left = -1 if window is None or window > longest else int(window) - 1
    right = 0 if causal else left
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    extra: dict[str, Any] = {}
    if q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        extra["enable_gqa"] = True
    out = varlen_attn(
        q, k, v, cu, cu, longest, longest, scale=kwargs.get("scaling"), window_size=(left, right), **extra
    )
    assert isinstance(out, Tensor)  # a tuple only with return_aux
    return out[None]


def _original_function(module: nn.Module, call: PackedCall) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if call.attn_implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[call.attn_implementation]
    for method in _own_functions(module):
        if (function := method.__globals__.get("eager_attention_forward")) is not None:
            return function
    raise PackingError(f"{type(module).__name__} has no eager attention function to run per document")


def _document_mask(length: int, causal: bool, window: int | None, like: Tensor, additive: bool) -> Tensor | None:
    """``(1, 1, L, L)`` mask for one document, or None where ``is_causal`` says it all."""
    windowed = window is not None and window < length
    if not additive and not windowed:
        return None
    i = torch.arange(length, device=like.device)
    distance = i[:, None] - i[None, :]
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if windowed:
        assert window is not None
        # as flash attention counts it: a window of w reaches w - 1 tokens, on either side where it is not causal
        allowed &= distance.abs() < window
    if not additive:
        return allowed[None, None]
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(allowed, zero, torch.finfo(like.dtype).min)[None, None]


def _per_document(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: PackedCall, kwargs: dict[str, Any]
) -> Tensor:
    """The model's own attention function, once per document: honours whatever that function honours."""
    lengths = list(call.layout.lengths)
    causal = _is_causal(module, kwargs)
    window = kwargs.get("sliding_window")
    splits = zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
    if call.attn_implementation == "sdpa" and {k for k, v in kwargs.items() if v is not None} <= (
        _HARMLESS | {"dropout", "scaling", "is_causal", "sliding_window"}
    ):
        gqa = query.shape[1] != key.shape[1]
        parts = [
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=(mask := _document_mask(q.shape[2], causal, window, q, additive=False)),
                dropout_p=kwargs.get("dropout") or 0.0,
                is_causal=causal and mask is None and q.shape[2] > 1,
                scale=kwargs.get("scaling"),
                enable_gqa=gqa,
            ).transpose(1, 2)
            for q, k, v in splits
        ]
        return torch.cat(parts, 1)
    original = _original_function(module, call)
    eager = call.attn_implementation == "eager"
    parts = []
    for q, k, v in splits:
        mask = _document_mask(q.shape[2], causal, window, q, additive=eager)
        parts.append(original(module, q, k, v, mask, **kwargs)[0])
    return torch.cat(parts, 1)
