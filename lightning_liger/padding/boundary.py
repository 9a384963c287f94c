"""Padding is removed where the backbone begins and put back where it ends.

The backbone is the decoder or encoder stack without its head (``base_model`` in transformers). Its ``forward`` is
rebound on the instance: a padded ``(B, S)`` call goes in, the stack runs on ``(1, T)`` real tokens, and what comes
out looks like ``(B, S, H)`` again. The user's code, the collate function and the head's model see no difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.head.lazy import LazyRows, PlainSource
from lightning_liger.padding.attention import PackedCall, PackingError, inside_packed_call, packed_attention
from lightning_liger.padding.counting import count_call
from lightning_liger.padding.layout import Layout, LayoutBook, NotPackable
from lightning_liger.patching import Rebound, Switch, bypass
from lightning_liger.report import NO_PADDING, PaddingReport

# Arguments of a backbone whose meaning is known, besides the token ones handled one by one below.
_TOKEN_ARGUMENTS = ("input_ids", "inputs_embeds", "token_type_ids")
_FLAGS = ("use_cache", "output_attentions", "output_hidden_states", "return_dict")
_CACHES = ("past_key_values", "cache", "past_key_value")
POSITIONS = ("columns", "restart", "restart_after_pad")


class Unsuitable(Exception):
    """This call runs as it is; the text says why."""


class PackedBackbone(Rebound):
    """``forward`` of one backbone, without its padding.

    Args:
        module: the backbone, a ``PreTrainedModel`` without head.
        switch: shared on/off flag.
        book: where layouts of the batch in flight are kept.
        report: counters and reasons.
        backend: ``attention`` option.
        positions: which position ids the padded run would have used for a token, see :meth:`_positions`.
    """

    def __init__(
        self, module: nn.Module, switch: Switch, book: LayoutBook, report: PaddingReport, backend: str, positions: str
    ) -> None:
        super().__init__(module, switch)
        self.book = book
        self.report = report
        self.backend = backend
        self.positions = positions
        self.off: dict[bool, str] = {}
        self.pads_unread = False
        parameters = inspect.signature(type(module).forward).parameters
        self._names = tuple(parameters)[1:]
        self._variadic = tuple(n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD)
        self._sharded: bool | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            call = self._named(args, kwargs)
            layout = self._layout(call)
        except (Unsuitable, NotPackable) as reason:
            self.report.left_padded(str(reason))
            return self.original(*args, **kwargs)
        self.report.packed(layout)
        plain = _PlainRun(self, args, kwargs, layout)
        return self._run(call, layout, plain)

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
        if torch.compiler.is_compiling():
            raise Unsuitable("torch.compile traces the backbone")
        count_call(self.report, self.book, call)
        if (reason := self.off.get(torch.is_grad_enabled())) is not None:
            raise Unsuitable(reason)
        tokens = _first(call, "input_ids", "inputs_embeds")
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise Unsuitable("no (B, S) tokens in the call")
        shape = (tokens.shape[0], tokens.shape[1])
        if any(call.get(name) is not None for name in _CACHES) or call.get("use_cache"):
            raise Unsuitable("a KV cache is in use")
        if call.get("output_attentions") or getattr(self.module.config, "output_attentions", False):
            raise Unsuitable("attention weights were asked for")
        if call.get("output_router_logits") or getattr(self.module.config, "output_router_logits", False):
            raise Unsuitable("router logits are counted per position")
        if call.get("cu_seq_lens_q") is not None:
            raise Unsuitable("the call is packed already (cu_seq_lens_q)")
        self._check_arguments(call, shape)
        mask = call.get("attention_mask")
        if mask is None:
            raise Unsuitable("no attention_mask was passed")
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise Unsuitable("the attention mask is not (B, S)")
        if tuple(mask.shape) != shape:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)} but the tokens have shape {shape}: each token needs "
                "its own mask value. Pad both alike in the collate function."
            )
        layout = self.book.layout(mask)
        if not layout.has_padding:
            raise Unsuitable(NO_PADDING)
        if not torch.is_grad_enabled() and self.is_sharded():
            raise Unsuitable("evaluation of a sharded model")
        return layout

    def _check_arguments(self, call: dict[str, Any], shape: tuple[int, int]) -> None:
        known = {*_TOKEN_ARGUMENTS, *_FLAGS, *_CACHES, "attention_mask", "position_ids", "output_router_logits"}
        for name, value in call.items():
            if name in known or value is None:
                continue
            if isinstance(value, Tensor) and value.dim() < 2:
                continue  # counts such as num_items_in_batch
            if isinstance(value, (Tensor, list, tuple, dict)):
                raise Unsuitable(f"argument {name!r} is not understood")
        positions = call.get("position_ids")
        if positions is not None and (
            not isinstance(positions, Tensor) or positions.shape[-1] != shape[1] or positions.dim() not in (2, 3)
        ):
            raise Unsuitable("position_ids of an unknown shape")

    def _positions(self, call: dict[str, Any], layout: Layout, device: torch.device) -> Tensor:
        """The ids the padded run would have given each real token.

        ``columns``: its column in the padded batch; ``restart``: counted from its document's first token;
        ``restart_after_pad``: the same plus ``pad_token_id + 1`` (the RoBERTa family). The probe found which.
        """
        placed = layout.on(device)
        given = call.get("position_ids")
        if given is not None:
            wide = given.expand(*given.shape[:-2], *layout.shape)
            return wide.flatten(-2)[..., placed.gather].unsqueeze(-2)
        if self.positions == "columns":
            return (placed.gather % layout.shape[1])[None]
        offset = 0 if self.positions == "restart" else int(self.module.config.pad_token_id) + 1
        return (placed.restart + offset)[None]

    # -- the packed run and the way out --------------------------------------------------------------------------

    def _run(self, call: dict[str, Any], layout: Layout, plain: PlainSource) -> Any:
        tokens = _first(call, "input_ids", "inputs_embeds")
        placed = layout.on(tokens.device)
        packed = {k: v for k, v in call.items() if v is not None and k != "attention_mask"}
        for name in _TOKEN_ARGUMENTS:
            if packed.get(name) is not None:
                packed[name] = packed[name].flatten(0, 1)[placed.gather][None]
        longest = max(layout.lengths)
        config = self.module.config
        packed.update(
            position_ids=self._positions(call, layout, tokens.device),
            cu_seq_lens_q=placed.cu_seqlens,
            cu_seq_lens_k=placed.cu_seqlens,
            max_length_q=longest,
            max_length_k=longest,
            packed_call=PackedCall(layout, config._attn_implementation or "eager", self.backend),
        )
        if "use_cache" in self._names or self._variadic:
            packed["use_cache"] = False
        with packed_attention(config), inside_packed_call():
            output = self.original(**packed)
        return self._padded_again(output, layout, plain)

    def _padded_again(self, output: Any, layout: Layout, plain: PlainSource) -> Any:
        def widen(value: Any, path: tuple[Any, ...]) -> Any:
            if isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == (1, layout.tokens):
                index = layout.on(value.device).index
                return LazyRows.hidden(value[0], index, has_pads=True, plain=plain, path=path)
            if isinstance(value, (tuple, list)):
                return type(value)(widen(v, (*path, i)) for i, v in enumerate(value))
            if value is None:
                return None
            raise PackingError(f"{type(self.module).__name__} returns something that cannot be padded again: {path}")

        if isinstance(output, (tuple, list)):
            return widen(output, ())
        for key in list(output.keys()):
            output[key] = widen(output[key], (key,))
        return output

    # -- what was learnt -----------------------------------------------------------------------------------------

    def is_sharded(self) -> bool:
        """Whether a forward is a collective, so that ranks must run the same number of them."""
        from torch.distributed.tensor import DTensor

        if self._sharded is None:
            self._sharded = any(isinstance(p, DTensor) for p in self.module.parameters())
        return self._sharded

    def leave_padded(self, reason: str, *, training: bool) -> None:
        """Run later calls of this kind (with gradients or without) as they are."""
        if training not in self.off:
            self.off[training] = reason
            self.report.switched_off(type(self.module).__name__, reason, training=training)


class _PlainRun(PlainSource):
    """The padded run of one packed call, made when somebody reads a padded position."""

    def __init__(self, backbone: PackedBackbone, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> None:
        self.backbone = backbone
        self._args = args
        self._kwargs = kwargs
        self._layout = layout
        self._with_gradients = torch.is_grad_enabled()
        self._outputs: dict[bool, Any] = {}

    def value(self, path: tuple[Any, ...]) -> Tensor:
        """The padded run's output at ``path``; the run is made once per call (and once more for gradients)."""
        graph = torch.is_grad_enabled()
        found = self._outputs.get(True, self._outputs.get(graph))
        if found is None:
            with bypass("a padded position was read"):
                found = self._outputs[graph] = self.backbone.original(*self._args, **self._kwargs)
            self.backbone.report.ran_twice()
        for step in path:
            found = found[step]
        return found

    def scored(self, what: str) -> None:
        if self.backbone.is_sharded():
            raise self._cannot_run_again(what)
        self.backbone.leave_padded(f"{what} reads padded positions", training=self._with_gradients)

    def read(self, path: tuple[Any, ...], what: str, differentiable: bool) -> Tensor | None:
        backbone = self.backbone
        if backbone.is_sharded() or (differentiable and backbone.pads_unread):
            return None
        value = self.value(path)
        if differentiable and value.requires_grad:
            value.register_hook(self._check(what))
        elif not self._with_gradients:
            backbone.leave_padded(f"{what} reads padded positions", training=False)
        return value

    def watch(self, what: str) -> Callable[[Tensor], None] | None:
        return None if self.backbone.pads_unread else self._check(what)

    def _check(self, what: str) -> Callable[[Tensor], None]:
        """A hook on ``(B, S, ·)`` values: does the loss depend on padded positions?"""

        def check(grad: Tensor) -> None:
            pads = self._layout.on(grad.device).index < 0
            if not bool((grad[pads] != 0).any()):
                self.backbone.pads_unread = True
                return
            self.scored(what)

        return check

    def _cannot_run_again(self, what: str) -> PackingError:
        return PackingError(
            f"{what} reads padded positions, whose values padding removal does not compute, and a sharded model "
            "cannot be run again on one rank. Set padding_free=False."
        )


def _first(call: dict[str, Any], *names: str) -> Any:
    return next((call[n] for n in names if call.get(n) is not None), None)
