"""Padding is removed where a decoder embeds its tokens, and put back where they leave it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map_only

from lightning_liger.head.lazy import LazyRows
from lightning_liger.mirrored import ordinary
from lightning_liger.padding.backends.errors import BackendError, PackingError
from lightning_liger.padding.counting import count_call
from lightning_liger.padding.layout import Layout, LayoutBook, NotPackable
from lightning_liger.padding.padding_free import PaddingFree
from lightning_liger.padding.plain_decoder.dispatch import BLOCKS, name_of, refuse_checkpoint
from lightning_liger.padding.plain_decoder.layouts import propose_layout, token_ids
from lightning_liger.padding.plain_decoder.multihead import UnreadTensor
from lightning_liger.padding.plain_decoder.padded_run import Attribute, DecoderRun
from lightning_liger.padding.plain_decoder.proof import disagreement
from lightning_liger.padding.plain_decoder.ragged import (
    OUTSIDE,
    RaggedTensor,
    Unpackable,
    gather,
    inside_block,
    is_outside_blocks,
    note_place,
    rows_of,
    wrap,
)
from lightning_liger.padding.plain_decoder.sharded import PATIENCE, ShardedBlocks, agreed_reason, sharded_blocks
from lightning_liger.padding.sources import Unsuitable
from lightning_liger.patching import Rebound, Switch
from lightning_liger.report import NO_PADDING, Report

# The call of a decoder that is running.
_RUN: ContextVar[DecoderRun | None] = ContextVar("lightning_liger_decoder_run", default=None)


class PackedDecoder(PaddingFree):
    """``forward`` of one decoder, without its padding.

    The first call that could be packed is made twice more, without gradients and dropout: padded and packed must agree
    at every real token.

    Args:
        module: takes token ids ``(B, S)`` and embeds them.
        switch: shared on/off flag.
        book: where layouts of the batch in flight are kept.
        report: its counters and reasons of padding removal are filled here.
        backend: ``attention`` option.
    """

    def __init__(self, module: nn.Module, switch: Switch, book: LayoutBook, report: Report, backend: str) -> None:
        super().__init__(module, switch, report.padding)
        self.book = book
        self.whole_report = report
        self.backend = backend
        self.proven: set[tuple[bool, bool]] = set()
        # in a list: a rehearsed step puts attributes back, and hooks stay where they are
        self._blocks: list[ShardedBlocks] = []
        parameters = inspect.signature(type(module).forward).parameters.values()
        self._names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))[1:]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _RUN.get() is not None or torch._C._are_functorch_transforms_active():
            return self.original(*args, **kwargs)
        extra = (f"argument {i}" for i in range(len(args)))
        call = {**dict(zip((*self._names, *extra), args, strict=False)), **kwargs}
        ids = token_ids(call)
        if ids is None or ids.numel() == 0:
            return self.original(*args, **kwargs)
        training = torch.is_grad_enabled()
        count_call(self.report, {**call, "input_ids": ids}, self.module)
        if training in self.off:
            return self.original(*args, **kwargs)
        layout: Layout | None = None
        try:
            layout = self._layout(call, ids)
        except (Unsuitable, NotPackable) as reason:
            self.why = str(reason)
            self.report.left_padded(self.why)
        if not self._agrees(args, kwargs, ids, layout) or layout is None:
            return self.original(*args, **kwargs)
        try:
            output = self.packed(args, kwargs, layout)
        except BackendError:
            raise  # the user's choice of backend cannot do this
        except PackingError as reason:
            if self.is_sharded():
                raise  # other ranks would not come to the blocks of a second run
            self.leave_padded(str(reason), training=training)
            return self.original(*args, **kwargs)
        self.runs += 1
        self.report.packed(layout)
        return output

    def _layout(self, call: dict[str, Any], ids: Tensor) -> Layout:
        sharded = self.is_sharded()
        if sharded and not self._in_step():
            raise Unsuitable("evaluation of a sharded model")
        if not self._blocks and (made := sharded_blocks(self.module)) is not None:
            self._blocks.append(made)
        if sharded and not self._blocks:
            raise Unsuitable(f"{type(self.module).__name__} is sharded, but not block by block with FSDP2")
        try:
            layout = propose_layout(call, ids, self.book, self.report.left_padded)
        except ValueError as error:  # a row without tokens, if the mask means what it seems to
            raise Unsuitable(str(error)) from None
        if not layout.has_padding:
            raise Unsuitable(NO_PADDING)
        return layout

    def _in_step(self) -> bool:
        """Whether every rank makes this call."""
        return torch.is_grad_enabled() or self.book.reads.in_step

    def unbind(self) -> None:
        while self._blocks:
            self._blocks.pop().remove()
        super().unbind()

    def _agrees(self, args: tuple[Any, ...], kwargs: dict[str, Any], ids: Tensor, layout: Layout | None) -> bool:
        """Whether padded and packed runs are the same; asked once for training and once for evaluation.

        Where passes are collectives, all ranks ask at the first call in which one of them has padding.
        """
        kind = torch.is_grad_enabled(), self.module.training
        if kind in self.proven:
            return True
        if not self.is_sharded():
            return layout is not None and self._settle(kind, self._reason_against(args, kwargs, layout))
        if not self._blocks or not self._in_step():
            return False
        blocks = self._blocks[0]
        wanted = blocks.anyone(layout is not None)
        if wanted is None:
            return self._settle(kind, f"no rank met padding in the first {PATIENCE} calls of a sharded model")
        if not wanted:
            return False
        # what is without padding is proven with its own rows, so that it runs as the others do later on
        rows = layout or Layout.from_mask(torch.ones(ids.shape, dtype=torch.bool))
        return self._settle(kind, agreed_reason(blocks, lambda: self._reason_against(args, kwargs, rows)))

    def _settle(self, kind: tuple[bool, bool], reason: str) -> bool:
        if reason:
            self.leave_padded(reason, training=kind[0])
            return False
        self.proven.add(kind)
        return True

    def _reason_against(self, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> str:
        try:
            with self.whole_report.unnoticed():
                return disagreement(self, args, kwargs, layout)
        except BackendError:
            raise
        except torch.OutOfMemoryError:
            return "there was no memory to compare it with the padded run"
        except PackingError as error:
            return str(error)
        except Exception as error:  # the decoder's own code, on tensors that it was not written for
            return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"

    def packed(self, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> Any:
        """The output, computed from real tokens alone.

        Raises:
            PackingError: it cannot be.
        """
        run = DecoderRun(self, args, kwargs, layout, self.backend)

        def outside_blocks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            refuse_checkpoint(name_of(func), PackedDecoder.packed.__code__)
            return run.outside(func, args, kwargs)

        token, outside = _RUN.set(run), OUTSIDE.set(outside_blocks)
        try:
            output = _leave(run, self.original(*args, **kwargs), ())
        finally:
            _RUN.reset(token)
            OUTSIDE.reset(outside)
            run.active = False
        if not run.embedded:
            raise Unpackable("its tokens do not go through an nn.Embedding as they were passed")
        return output


class PackedEmbedding(Rebound):
    """``forward`` of a token table: where a batch becomes ragged."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        run = _RUN.get()
        ids = args[0] if len(args) == 1 and not kwargs else kwargs.get("input")
        if (
            run is None
            or len(args) + len(kwargs) != 1
            or not isinstance(ids, Tensor)
            or tuple(ids.shape) != run.packing.layout.shape
        ):
            return self.original(*args, **kwargs)
        refuse_checkpoint("its embedding of tokens", PackedDecoder.packed.__code__)
        run.embedded = True
        note_place("an embedding of token ids")
        module, ids = self.module, ordinary(ids)
        if self.previous is None and type(module).forward is nn.Embedding.forward and module.max_norm is None:
            rows = self.original(gather(ids, run.packing, 0, 1))
        else:
            rows = gather(self.original(ids), run.packing, 0, 1)
        return wrap(rows, run.packing, 0, 1)


class PackedBlock(Rebound):
    """``forward`` of one block: inside of it, no tensor needs a place in the graph but its rows'."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not tree_any(lambda a: isinstance(a, RaggedTensor), (args, kwargs)):
            return self.original(*args, **kwargs)
        with inside_block():
            output = self.original(*args, **kwargs)
        if not is_outside_blocks():
            return output
        return tree_map_only(RaggedTensor, lambda t: wrap(rows_of(t), t.packing, t.batch, t.seq), output)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A block recomputed in backward must do what it did even when the switch went off in between.
        if torch._C._current_graph_task_id() != -1 and not torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        return super().__call__(*args, **kwargs)


BLOCKS.add(PackedBlock.call.__code__)


class PackedHead(Rebound):
    """``forward`` of a language-model head, which takes lazy hidden states."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        run = _RUN.get()
        if run is not None and len(args) == 1 and not kwargs and isinstance(args[0], RaggedTensor):
            refuse_checkpoint("its head", PackedDecoder.packed.__code__)
            return self.original(run.at_head(self.module, args[0]))
        return self.original(*args, **kwargs)


def _leave(run: DecoderRun, value: Any, path: tuple[Any, ...]) -> Any:
    """The decoder's output with ``(B, S, H)`` tensors in place of ragged ones."""
    if isinstance(value, RaggedTensor):
        return run.in_output(value, path)
    if isinstance(value, LazyRows):
        if any(getattr(leaf, "path", ())[:1] == ("inside",) for leaf in value.view_.leaves()):
            raise Unpackable("it returns a part of its hidden states")
        return value
    if isinstance(value, UnreadTensor):
        raise Unpackable("it returns attention weights")
    if isinstance(value, (str, bytes, int, float, Tensor, type(None))):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_leave(run, v, (*path, i)) for i, v in enumerate(value)))
    if isinstance(value, (tuple, list)):
        return type(value)(_leave(run, v, (*path, i)) for i, v in enumerate(value))
    if isinstance(value, Mapping):
        made = {k: _leave(run, v, (*path, k)) for k, v in value.items()}
        return made if type(value) is dict else type(value)(**made)
    if any(isinstance(v, RaggedTensor) for v in getattr(value, "__dict__", {}).values()):
        if not dataclasses.is_dataclass(value):
            raise Unpackable(f"it returns a {type(value).__name__} that holds hidden states")
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        kind: Any = type(value)
        return kind(**{n: _leave(run, v, (*path, Attribute(n))) for n, v in fields.items()})
    return value
