"""Padding is removed where the backbone begins and put back where it ends.

The backbone is the decoder or encoder stack without its head (``base_model`` in transformers). Its ``forward`` is
rebound on the instance: a padded ``(B, S)`` call goes in, the stack runs on ``(1, T)`` real tokens, and what comes
out looks like ``(B, S, H)`` again. The user's code, the collate function and the head's model see no difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.head.lazy import LazyRows
from lightning_liger.mirrored import ordinary
from lightning_liger.padding.arguments import CACHES, TOKEN_ARGUMENTS, check_arguments, first, rotates_by_length
from lightning_liger.padding.attention import PackedCall, inside_packed_call, packed_attention
from lightning_liger.padding.backends.errors import BackendError, PackingError
from lightning_liger.padding.buckets import OFF, ShapeBuckets, divisible, notices_filler
from lightning_liger.padding.counting import count_call
from lightning_liger.padding.first_batch import FirstBatch
from lightning_liger.padding.layout import Layout, LayoutBook, NotPackable
from lightning_liger.padding.padding_free import PaddingFree
from lightning_liger.padding.plain import PlainRun, deferred_cache
from lightning_liger.padding.sources import Unsuitable, find_layout
from lightning_liger.padding.verdict import Verdict
from lightning_liger.patching import Switch
from lightning_liger.report import SHARDED_EVALUATION, PaddingReport
from lightning_liger.sequence import SequenceGroup


class PackedBackbone(PaddingFree):
    """``forward`` of one backbone, without its padding.

    Args:
        module: the backbone, a ``PreTrainedModel`` without head.
        switch: shared on/off flag.
        book: where layouts of the batch in flight are kept.
        report: counters and reasons.
        backend: ``attention`` option.
        verdict: what was learnt about the architecture: position ids, causality, the KV cache it returns.
        begins: called with the backbone before each packed call with gradients.
        buckets: which shape a packed batch is lengthened to.
        sequence: the ranks among which the tokens of a packed batch are divided.
    """

    def __init__(
        self,
        module: nn.Module,
        switch: Switch,
        book: LayoutBook,
        report: PaddingReport,
        backend: str,
        verdict: Verdict,
        buckets: ShapeBuckets = OFF,
        begins: Callable[[nn.Module, int], None] = lambda backbone, size: None,
        sequence: SequenceGroup | None = None,
    ) -> None:
        super().__init__(module, switch, report)
        self.book = book
        self.backend = backend
        self.verdict = verdict
        self.buckets = buckets
        self.begins = begins
        self.sequence = sequence
        self.asks: set[str] = set()
        self._first_batch = FirstBatch(self)
        self._filler_problem: str | None = None
        parameters = inspect.signature(type(module).forward).parameters
        self._names = tuple(parameters)[1:]
        self._variadic = tuple(n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)  # traced code has one shape, and no documents in it
        if torch.is_grad_enabled() in self.off:
            count_call(self.report, {**dict(zip(self._names, args, strict=False)), **kwargs}, self.module)
            return self._as_it_is(args, kwargs)
        try:
            call = self._named(args, kwargs)
            layout = self._layout(call)
        except (Unsuitable, NotPackable) as reason:
            self.why = str(reason) if self.sequence is None else f"{reason}, so that each rank runs the whole batch"
            self.report.left_padded(self.why)
            return self._as_it_is(args, kwargs)
        args, kwargs, call = ordinary((args, kwargs, call))
        try:
            if self._is_inferred(call, layout) and (
                difference := self._first_batch.disagrees(args, kwargs, call, layout)
            ):
                for training in (True, False):
                    self.leave_padded(difference, training=training)
                return self._as_it_is(args, kwargs)
            output = self.run(call, layout, PlainRun(self, args, self._by_name(call, kwargs), layout))
        except BackendError:
            raise  # the user's choice of backend cannot do this
        except PackingError as reason:
            if self.is_sharded():
                raise
            self.leave_padded(str(reason), training=torch.is_grad_enabled())
            return self.original(*args, **kwargs)
        self.runs += 1
        self.report.packed(layout, self._shaped(layout))
        return output

    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = ordinary((args, kwargs))
        return self.original(*args, **kwargs)

    # -- going in ------------------------------------------------------------------------------------------------

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if len(args) > len(self._names):
            raise Unsuitable("positional arguments that the backbone does not name")
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def _layout(self, call: dict[str, Any]) -> Layout:
        """The layout of this call.

        Raises:
            Unsuitable, NotPackable: the call must run as it is.
            ValueError: the call cannot be right either way.
        """
        config = self.module.config
        tokens = first(call, "input_ids", "inputs_embeds")
        if not isinstance(tokens, Tensor) or tokens.dim() < 2 or tokens.numel() == 0:
            raise Unsuitable("no (B, S) tokens in the call")
        shape = (tokens.shape[0], tokens.shape[1])
        self.report.seen(shape, self.module)
        if any(call.get(name) is not None for name in CACHES):
            raise Unsuitable("a KV cache is in use")
        if call.get("output_attentions") or getattr(config, "output_attentions", False):
            raise Unsuitable("attention weights were asked for")
        if call.get("output_router_logits") or getattr(config, "output_router_logits", False):
            raise Unsuitable("router logits are counted per position")
        if self.verdict.cache_problem and self._wants_cache(call):
            raise Unsuitable(f"a KV cache is asked for ({self.verdict.cache_problem})")
        check_arguments(call, shape, self._names)
        if not torch.is_grad_enabled() and not self.book.reads.in_step and self.is_sharded():
            raise Unsuitable(SHARDED_EVALUATION)
        pad = getattr(config, "pad_token_id", None)
        layout = find_layout(
            call,
            tokens,
            self.book,
            self.report.left_padded,
            causal=self.verdict.causal,
            flash=str(config._attn_implementation).startswith("flash"),
            pad=pad if isinstance(pad, int) else None,
            keep_full=self.sequence is None and not self._takes_filler(),
        )
        if layout.reach < shape[1] and rotates_by_length(config):
            raise Unsuitable("rotary positions are scaled by the padded length, which is longer than every row")
        return layout

    def _positions(self, call: dict[str, Any], layout: Layout, device: torch.device) -> Tensor:
        """The ids the padded run would have given each real token.

        ``columns``: its column in the padded batch; ``restart``: counted from its row's first token;
        ``restart_after_pad``: the same plus ``pad_token_id + 1`` (the RoBERTa family). The probe found which.
        """
        placed = layout.on(device)
        given = call.get("position_ids")
        if given is not None:
            wide = given.expand(*given.shape[:-2], *layout.shape)
            return wide.flatten(-2)[..., placed.gather].unsqueeze(-2)
        if self.verdict.positions == "columns":
            return (placed.gather % layout.shape[1])[None]
        offset = 0 if self.verdict.positions == "restart" else int(self.module.config.pad_token_id) + 1
        return (placed.restart + offset)[None]

    def _is_inferred(self, call: dict[str, Any], layout: Layout) -> bool:
        """Whether only the tokens say which of them are padding."""
        return layout.has_padding and call.get("attention_mask") is None

    def _shaped(self, layout: Layout) -> Layout:
        layout = self.buckets.lengthened(layout) if self._takes_filler() else layout
        return layout if self.sequence is None else divisible(layout, self.sequence.size)

    def _takes_filler(self) -> bool:
        if not self.buckets.on:
            return False
        if self._filler_problem is None:
            self._filler_problem = reason = notices_filler(self.module)
            if reason:
                name = type(self.module).__name__
                self.report.refuse(f"shape_buckets: {name} keeps the shapes of its batches: {reason}")
        return not self._filler_problem

    # -- the packed run and the way out --------------------------------------------------------------------------

    def run(self, call: dict[str, Any], layout: Layout, plain: PlainRun) -> Any:
        tokens = first(call, "input_ids", "inputs_embeds")
        layout = self._shaped(layout)
        placed, own = layout.on(tokens.device), self._own(layout)
        # labels that the backbone does not name have only come along with the other keywords
        packed = {k: v for k, v in call.items() if v is not None and k not in ("attention_mask", "labels")}
        for name in TOKEN_ARGUMENTS:
            if packed.get(name) is not None:
                packed[name] = packed[name].flatten(0, 1)[placed.gather[own]][None]
        config = self.module.config
        implementation = config._attn_implementation or "eager"
        packed_call = PackedCall(layout, implementation, self.backend, self.report, self.asks, sequence=self.sequence)
        positions: Any = self._positions(call, layout, tokens.device)[..., own]
        positions.packed_call = packed_call
        packed.update(packed_call.arguments(tokens.device), position_ids=positions)
        if "use_cache" in self._names or self._variadic:
            packed["use_cache"] = False
        as_tuple = self._wants_tuple(call)
        if as_tuple:
            packed["return_dict"] = True  # a tuple does not say what is missing from it
        if torch.is_grad_enabled():
            self.begins(self.module, layout.size)
        with packed_attention(config), inside_packed_call():
            output = self.original(**packed)
        output = self._padded_again(output, layout, plain)
        output = self._with_cache(output, call, plain)
        return output.to_tuple() if as_tuple else output

    def _own(self, layout: Layout) -> slice:
        """The tokens of a packed batch that run on this rank."""
        if self.sequence is None:
            return slice(0, layout.size)
        each = layout.size // self.sequence.size
        return slice(self.sequence.rank * each, (self.sequence.rank + 1) * each)

    def _wants_tuple(self, call: dict[str, Any]) -> bool:
        wanted = call.get("return_dict")
        if wanted is None:
            wanted = getattr(self.module.config, "return_dict", True)
        return not wanted and ("return_dict" in self._names or bool(self._variadic))

    def _by_name(self, call: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords of a padded run whose output has names, as the packed one's has."""
        return {**kwargs, "return_dict": True} if self._wants_tuple(call) else kwargs

    def _padded_again(self, output: Any, layout: Layout, plain: PlainRun) -> Any:
        own = self._own(layout)
        size = own.stop - own.start

        def widen(value: Any, path: tuple[Any, ...]) -> Any:
            if isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == (1, size):
                index, pads = layout.on(value.device).index, layout.has_padding
                plain.returned(path, value[0])
                return LazyRows.hidden(value[0], index, has_pads=pads, plain=plain, path=path, sequence=self.sequence)
            if isinstance(value, (tuple, list)):
                return type(value)(widen(v, (*path, i)) for i, v in enumerate(value))
            if value is None:
                return None
            raise PackingError(f"{type(self.module).__name__} returns {path}, which cannot be padded again")

        if not isinstance(output, Mapping):
            return widen(output, ())
        made = {key: widen(value, (key,)) for key, value in output.items() if key != "pooler_output"}
        if output.get("pooler_output") is not None:
            made["pooler_output"] = self._pooled(made["last_hidden_state"])
        return type(output)(**made)

    def _pooled(self, hidden: Tensor) -> Tensor:
        """What the pooler makes of ``(B, S, H)``: in the packed run it has seen one row of documents."""
        pooler = getattr(self.module, "pooler", None)
        if isinstance(pooler, nn.Linear):
            return self.module.pooler_activation(pooler(hidden[:, 0]))
        if not isinstance(pooler, nn.Module):
            raise PackingError(f"{type(self.module).__name__} pools its hidden states in a way that is not known")
        return pooler(hidden)

    def _with_cache(self, output: Any, call: dict[str, Any], plain: PlainRun) -> Any:
        """With the KV cache that the padded run would have returned, made when somebody touches it."""
        if self.verdict.cache is None or not self._wants_cache(call) or not isinstance(output, Mapping):
            return output
        name, kind = self.verdict.cache
        return type(output)(**{**output, name: deferred_cache(kind, plain, name)})

    def _wants_cache(self, call: dict[str, Any]) -> bool:
        wanted = call.get("use_cache")
        return bool(getattr(self.module.config, "use_cache", False) if wanted is None else wanted)
