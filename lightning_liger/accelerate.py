"""Apply everything to one module, in place, and be able to take it back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from lightning_liger.head.apply import LazyHead, LazyTokenHead
from lightning_liger.head.finding import find_heads, trains_tokens
from lightning_liger.kernels.apply import Kernels
from lightning_liger.kernels.registry import KernelBinding
from lightning_liger.padding.attention import PackedAttention
from lightning_liger.padding.backbones import attention_dropout, attention_layers, find_backbones, head_size
from lightning_liger.padding.backends.choice import check_named
from lightning_liger.padding.boundary import PackedBackbone
from lightning_liger.padding.buckets import ShapeBuckets, is_compiled_inside
from lightning_liger.padding.counting import CountedBackbone
from lightning_liger.padding.layout import LayoutBook
from lightning_liger.padding.per_row import PerRowAdapters
from lightning_liger.padding.plain_decoder.decoder import (
    PackedBlock,
    PackedDecoder,
    PackedEmbedding,
    PackedHead,
)
from lightning_liger.padding.plain_decoder.finding import Decoder, find_decoders
from lightning_liger.padding.plain_decoder.parts import PackedPart
from lightning_liger.padding.probe import Verdict, packing_verdict
from lightning_liger.padding.slicing import why_not_sliced
from lightning_liger.patching import (
    Binding,
    BypassedGenerate,
    Rebound,
    Switch,
    calls_compiled,
    inside_compiled,
    live_binding,
)
from lightning_liger.report import Report
from lightning_liger.sequence import SequenceGroup
from lightning_liger.settings import Settings
from lightning_liger.tiling.binding import TiledMLP
from lightning_liger.tiling.finding import find_mlps
from lightning_liger.tuning.blocks import BlockRuns
from lightning_liger.tuning.together import compile_choice

_COMPILED = "is inside a torch.compile; compile the layers instead (for layer in layers: layer.compile())"
_PADDING_OFF = "switched off (padding_free=False)"
_ACCELERATED: weakref.WeakKeyDictionary[nn.Module, Accelerated] = weakref.WeakKeyDictionary()


class Accelerated:
    """What :func:`accelerate` did to one module.

    Attributes:
        report: what is on, what is off and why, and counters.
        settings: the options it was done with.
        sequence: the ranks that share each batch; None where each has its own.
        book: pairs a batch's CPU tensors with its device tensors, see :class:`LayoutBook`. Optional to feed.
        runs: how decoder blocks run.
        buckets: which shapes packed batches are lengthened to.
    """

    def __init__(self, module: nn.Module, settings: Settings, sequence: SequenceGroup | None = None) -> None:
        self._module = weakref.ref(module)
        self.settings = settings
        self.sequence = sequence
        self.report = Report()
        self.book = LayoutBook()
        self.buckets = ShapeBuckets(settings.shape_buckets)
        self._switch = Switch(True)
        self._kernels = Kernels(settings.kernels, self.report.kernels, self._switch)
        choice = compile_choice(settings.compile, sequence, self.report.blocks)
        self.runs = BlockRuns(choice, self.report, self._switch, self.buckets, self._keep)
        # weak, all of them: this object is a value in the registry, and would keep its own key alive
        self._bindings: list[Binding] = []
        self._heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._backbones: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._tiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def is_active(self) -> bool:
        return self._switch.on

    def bindings(self) -> list[Binding]:
        """All that was bound since the last ``revert``, whoever took it away again."""
        return list(self._bindings)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the original code inside this block."""
        before = self._switch.on
        self._switch.on = False
        try:
            yield
        finally:
            self._switch.on = before

    def revert(self) -> None:
        """Take everything back: no attribute of the module, of its classes or of a library stays changed."""
        self._switch.on = False
        self.book.close()
        self.runs.close()
        for bound in reversed(self._bindings):
            if (binding := bound.binding()) is not None:
                binding.unbind()
        self._bindings.clear()
        module = self._module()
        if module is not None and _ACCELERATED.get(module) is self:
            del _ACCELERATED[module]

    # -- applying ------------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module) -> None:
        """Bind to what the module holds now; what is bound already stays as it is."""
        # below everything else: padding removal wraps the forwards that kernels replace
        timed = self.runs.times_kernels() and self.settings.padding_free and bool(find_backbones(module)[0])
        if timed:
            self.runs.tuned_ops = self._kernels.left_open()
        for binding in self._kernels.bindings(module, timed):
            self._keep(binding)
        compiled = inside_compiled(module)
        self._tile_mlps(module, compiled)
        self._remove_padding(module, compiled)
        decoders = self._remove_padding_of_decoders(module, compiled)
        self.book.follow = compiled <= self._behind_backbones() and not calls_compiled(module)
        if self.settings.fused_head:
            self._fuse_heads(module, compiled)
        else:
            self.report.head.refuse("switched off (fused_head=False)")
        for head in {h for d in decoders for h in d.module.modules() if h in self._heads}:
            self._bind(head, PackedHead)
        for model in module.modules():
            if callable(getattr(type(model), "generate", None)) and hasattr(
                type(model), "prepare_inputs_for_generation"
            ):
                self._bind(model, BypassedGenerate)
            if callable(getattr(type(model), PerRowAdapters.name, None)) and hasattr(type(model), "get_base_model"):
                self._bind(model, PerRowAdapters, self.report.padding)

    def _behind_backbones(self) -> set[nn.Module]:
        """What is called with ordinary tensors only, whatever tensors a step sees."""
        kinds = (PackedBackbone, CountedBackbone)
        found = [b for b in self._backbones if any(live_binding(b, k.name, self._switch, k) for k in kinds)]
        return {m for b in found for m in b.modules()}

    def _bind(self, module: nn.Module, kind: type[Rebound], *args: Any) -> bool:
        """Bind once; True if it was new."""
        if live_binding(module, kind.name, self._switch, kind) is not None:
            return False
        self._keep(kind(module, self._switch, *args))
        return True

    def _keep(self, binding: Rebound) -> None:
        binding.bind()
        self._bindings.append(Binding(weakref.ref(binding), weakref.ref(binding.module), binding.feature))

    def _tile_mlps(self, module: nn.Module, compiled: set[nn.Module]) -> None:
        choice, report = self.settings.tiled_mlp, self.report.tiling
        if choice is False:
            return
        report.asked = choice != "auto"
        suited, refused = find_mlps(module, self._tiled)
        self._tiled.update(module.modules())
        for reason in refused:
            report.refuse(reason)
        for mlp in suited:
            report.found += 1
            if mlp in compiled:
                report.refuse(f"{type(mlp).__name__} {_COMPILED}")
            elif self._bind(mlp, TiledMLP, choice, report):
                report.applied += 1
                report.name(type(mlp).__name__)

    def _remove_padding(self, module: nn.Module, compiled: set[nn.Module]) -> None:
        report = self.report.padding
        suited, refused = find_backbones(module)
        if not self.settings.padding_free:
            report.refuse(_PADDING_OFF)
            refused = dict.fromkeys([*suited, *refused], _PADDING_OFF)
            suited = []
        if any(map(is_compiled_inside, suited)):
            self.buckets.turn_on_if_auto()
        for backbone in (*suited, *refused):
            if backbone in self._backbones:
                continue
            self._backbones.add(backbone)
            report.found += self.settings.padding_free
            if backbone in compiled:
                report.refuse(f"{type(backbone).__name__} {_COMPILED}")
                continue
            verdict = Verdict(None, refused[backbone]) if backbone in refused else packing_verdict(backbone)
            if self.sequence is not None and verdict.positions is not None and (why := why_not_sliced(backbone)):
                verdict = Verdict(None, f"sequence parallel: {why}")
            if verdict.positions is None:
                report.refuse(verdict.reason)
                self._bind(backbone, CountedBackbone, report)
                continue
            wants = verdict.asks | attention_dropout(backbone)
            check_named(self.settings.attention, wants, head_size(backbone), type(backbone).__name__)
            for layer in attention_layers(backbone):
                self._bind(layer, PackedAttention)
            arguments = (self.book, report, self.settings.attention, verdict, self.buckets, self.runs.before_call)
            self._bind(backbone, PackedBackbone, *arguments, self.sequence)
            self.runs.add(backbone)
            report.applied += 1
            report.name(type(backbone).__name__)

    def _remove_padding_of_decoders(self, module: nn.Module, compiled: set[nn.Module]) -> list[Decoder]:
        report = self.report.padding
        packed = []
        for decoder in find_decoders(module) if self.settings.padding_free else ():
            model, name = decoder.module, type(decoder.module).__name__
            is_new = model not in self._backbones
            self._backbones.add(model)
            report.found += is_new
            if not compiled.isdisjoint(model.modules()):
                report.refuse(f"{name} {_COMPILED}" if model in compiled else f"{name}: its layers are compiled")
                continue
            check_named(self.settings.attention, frozenset(), None, name)
            if self.sequence is not None:
                report.refuse(f"sequence parallel: {name} is no transformers model, and each rank runs the whole batch")
            packed.append(decoder)
            if callable(getattr(type(model), "generate", None)):
                self._bind(model, BypassedGenerate)
            for table in decoder.embeddings:
                self._bind(table, PackedEmbedding)
            for block in decoder.blocks:
                self._bind(block, PackedBlock)
            on_kernels = [m for m in model.modules() if self._runs_by_row(m)]
            for part in (*on_kernels, *decoder.parts):
                self._bind(part, PackedPart, part in on_kernels)
            if self.buckets.on:
                report.refuse(f"shape_buckets: {name} is no transformers model and keeps the shapes of its batches")
            if self._bind(model, PackedDecoder, self.book, self.report, self.settings.attention):
                report.applied += 1
                report.name(name)
        return packed

    def _runs_by_row(self, module: nn.Module) -> bool:
        binding = live_binding(module, "forward", self._switch, KernelBinding)
        return isinstance(binding, KernelBinding) and binding.by_row

    def _fuse_heads(self, module: nn.Module, compiled: set[nn.Module]) -> None:
        report = self.report.head
        heads, refused = find_heads(module, self.settings.head)
        for reason in refused:
            report.refuse(reason)
        for head in heads:
            if head in self._heads:
                continue
            self._heads.add(head)
            if head in compiled:
                report.refuse(f"the head {_COMPILED}")
                continue
            kind = LazyTokenHead if trains_tokens(head) else LazyHead
            if self._bind(head, kind, report, self.settings.head_backend):
                report.applied += 1
        report.found = max(report.found, len(self._heads) + len(refused))


def accelerate(
    module: nn.Module, settings: Settings | None = None, sequence: SequenceGroup | None = None
) -> Accelerated:
    """Remove padding and fuse the LM head in every model that ``module`` holds. Changes no class and no library.

    Calling it again on the same module is cheap: it picks up submodules that are new and answers with the same object.

    Args:
        module: a LightningModule, a transformers model, or any module that holds one.
        settings: options; other settings than the first call's take the first ones back.
        sequence: the ranks among which the packed tokens of each batch are divided. All of them call this, and run the
            same steps on the same batches; gradients are to be averaged over them. Another group than the first call's
            takes the first one back; None, as for ``settings``, leaves what is there.

    Returns:
        The handle with ``report`` and ``revert()``.

    Raises:
        ValueError: an option that does not fit the module.
    """
    known = _ACCELERATED.get(module)
    sequence = sequence if sequence is not None and sequence.size > 1 else None
    if known is not None:
        wanted = settings or known.settings, sequence or known.sequence
        if wanted != (known.settings, known.sequence):
            known.revert()
            known, (settings, sequence) = None, wanted
    if known is None:
        known = Accelerated(module, settings or Settings(), sequence)
        _ACCELERATED[module] = known
    try:
        known.apply(module)
    except BaseException:
        known.revert()
        raise
    return known
