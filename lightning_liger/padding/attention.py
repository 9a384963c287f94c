"""Attention over packed documents, plugged into transformers for the length of one call.

While a packed call runs, and while one of its layers is recomputed in backward, the attention interface of
transformers holds one extra name, :data:`PACKED`. Between calls nothing of it is left. The document boundaries travel
in the call's keyword arguments only: whatever is passed out of band is gone when a checkpointed layer is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.padding.backends.choice import choose
from lightning_liger.padding.backends.documents import by_model, by_torch, plain
from lightning_liger.padding.backends.errors import PackingError
from lightning_liger.padding.backends.features import Features
from lightning_liger.padding.backends.registry import Backend
from lightning_liger.padding.backends.traced import TracedCall, traced_attention
from lightning_liger.padding.interface import original_function
from lightning_liger.padding.layout import Layout
from lightning_liger.parallel.ulysses import OwnHeads, heads_for_tokens, own_heads, tokens_for_heads
from lightning_liger.patching import Rebound, bindings_of
from lightning_liger.report import PaddingReport
from lightning_liger.sequence import SequenceGroup

PACKED = "liger_packed"
_FLASH = ("fa4", "fa3", "fa2", "varlen")
_KERNELS = ("flash", "fmha", "attn", "attention")
_INSIDE: ContextVar[bool] = ContextVar("lightning_liger_packed_call", default=False)


@dataclass(eq=False)  # of a frozen one Dynamo (torch 2.11) looks at each field, and compiles again where one differs
class PackedCall:
    """What the attention layers of one packed call need to know; passed along as ``packed_call=``.

    Attributes:
        layout: of all tokens, also where ``sequence`` says that each rank has a slice of them.
    """

    layout: Layout
    attn_implementation: str
    backend: str
    report: PaddingReport
    asks: set[str] = field(default_factory=set)
    sequence: SequenceGroup | None = None
    chosen: dict[object, tuple[Features, Backend]] = field(default_factory=dict)

    def attended(self, backend: str, layer: nn.Module) -> None:
        """``layer`` has used this backend."""
        self.report.attended(backend)
        for binding in bindings_of(layer):
            if isinstance(binding, PackedAttention):
                binding.attended(backend)

    def drop(self, reason: str) -> None:
        """A backend was not used that could have been."""
        self.report.refuse(reason)

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """The keywords that say so, as flash attention in transformers takes them, and this call itself."""
        cu_seqlens, longest = self.layout.on(device).cu_seqlens, self.layout.longest
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


class PackedAttention(Rebound):
    """``forward`` of one attention layer: switches the interface over for packed calls, first run or recomputed."""

    feature = "attention"
    by_positions = False
    backend = ""

    @property
    def launches(self) -> tuple[str, ...]:
        return _KERNELS if self.backend in _FLASH else ()

    def attended(self, backend: str) -> None:
        """The layer's attention was computed by ``backend``."""
        self.backend = backend
        self.runs += 1

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if packed_call_of(kwargs) is not None:
            return self._packed(args, kwargs)
        if _INSIDE.get() or (self.by_positions and torch._C._current_graph_task_id() != -1):
            raise PackingError(
                f"{type(self.module).__name__} was not handed the document boundaries of the packed batch"
            )
        return self.original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A layer recomputed in backward must stay packed even when the switch went off in between.
        if packed_call_of(kwargs) is not None:
            return self._packed(args, kwargs)
        return super().__call__(*args, **kwargs)

    def _packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "packed_call" not in kwargs:
            # the decoder layer names the arguments that it hands on, and these are not among them
            self.by_positions = True
            call = packed_call_of(kwargs)
            assert call is not None
            kwargs = {**kwargs, **call.arguments(kwargs["position_ids"].device)}
        with packed_attention(self.module.config):
            return self.original(*args, **kwargs)


def packed_call_of(kwargs: dict[str, Any]) -> PackedCall | None:
    """From the keywords, or from the position ids that carry it through layers which drop keywords."""
    given = kwargs.get("packed_call")
    return given if given is not None else getattr(kwargs.get("position_ids"), "packed_call", None)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_call: PackedCall | TracedCall | None = None,
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
        BackendError: the backend asked for by name cannot run this layer.
    """
    if isinstance(packed_call, TracedCall):
        causal = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
        query, key, value = _autocast(query, key, value)
        return traced_attention(packed_call, query, key, value, causal, kwargs)[None], None
    return _attend(module, query, key, value, attention_mask, packed_call, kwargs), None


@torch.compiler.disable  # what is traced of documents holds for these lengths only, and would be compiled for each batch
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_call: PackedCall | None,
    kwargs: dict[str, Any],
) -> Tensor:
    name = type(module).__name__
    if packed_call is None:
        raise PackingError(f"{name} does not hand its keyword arguments to the attention function")
    if attention_mask is not None:
        raise PackingError(f"{name} made an attention mask of its own for the packed batch")
    tokens = packed_call.layout.size // (1 if packed_call.sequence is None else packed_call.sequence.size)
    if query.shape[0] != 1 or query.shape[2] != tokens or key.shape[2] != tokens:
        raise PackingError(f"{name} attends over another length than the packed batch has")
    if packed_call.sequence is None:
        return _attend_to_all(module, module, query, key, value, packed_call, kwargs)[None]
    return _exchanged(module, query, key, value, packed_call, packed_call.sequence, kwargs)[None]


def _exchanged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_call: PackedCall,
    sequence: SequenceGroup,
    kwargs: dict[str, Any],
) -> Tensor:
    """With a slice of the tokens on each rank: attention of some of the heads over all tokens; ``(T / k, heads, size)``."""
    heads = query.shape[1]
    query, key, value = _autocast(query, key, value)
    try:
        query, key, value = heads_for_tokens(query, key, value, sequence.size, sequence.name)
    except ValueError as reason:
        raise PackingError(f"{type(module).__name__}: {reason}. Use another sequence_parallel_size.") from reason
    if kwargs.get("s_aux") is not None:
        kwargs = {**kwargs, "s_aux": own_heads(kwargs["s_aux"], heads, sequence.size, sequence.rank)}
    seen_as = OwnHeads(module, heads, key.shape[1], sequence)
    output = _attend_to_all(module, seen_as, query, key, value, packed_call, kwargs)
    return tokens_for_heads(output, sequence.size, sequence.name)


def _attend_to_all(
    module: nn.Module,
    seen_as: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_call: PackedCall,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention over all tokens; ``(T, heads, size)``.

    Args:
        seen_as: the layer, as the model's own attention function is to see it.
    """
    layout = packed_call.layout
    asked = packed_call.backend
    if asked == "auto" and packed_call.attn_implementation.startswith("flash"):
        packed_call.attended(f"{packed_call.attn_implementation}, as the model was loaded", module)
        out: Tensor = original_function(module, packed_call.attn_implementation)(
            seen_as, query, key, value, None, **kwargs
        )[0]
        return out[0]
    query, key, value = _autocast(query, key, value)
    given = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if given is None else given)
    signature = Features.signature(query, key, value, causal, kwargs)
    if signature not in packed_call.chosen:
        wanted = Features.of(query, key, value, causal, kwargs).within(layout.longest)
        packed_call.asks.update(wanted.asked())
        packed_call.chosen[signature] = wanted, choose(asked, wanted, layout, query.device, packed_call.drop)
    features, backend = packed_call.chosen[signature]
    packed_call.attended(backend.name, module)
    if backend.run is not None:
        return backend.run(query, key, value, layout, features, kwargs.get("s_aux"))
    return _per_document(module, seen_as, query, key, value, packed_call, features, kwargs)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast makes of the inputs of ``F.scaled_dot_product_attention``, which our kernels are called instead of."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(t.to(torch.get_autocast_dtype(kind)) if t.dtype == torch.float32 else t for t in tensors)


def _per_document(
    module: nn.Module,
    seen_as: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: PackedCall,
    features: Features,
    kwargs: dict[str, Any],
) -> Tensor:
    """The model's own attention function, once per document: honours whatever that function honours."""
    implementation = call.attn_implementation
    if implementation != "eager" and plain(features):
        return by_torch(query, key, value, call.layout, features)
    if implementation not in ("eager", "sdpa"):
        implementation = "eager"  # flex and flash functions read their documents from masks and not from these
    original = original_function(module, implementation)

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return original(seen_as, q, k, v, mask, **kwargs)[0]

    return by_model(function, query, key, value, call.layout, features, additive=implementation == "eager")
