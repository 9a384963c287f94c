"""Watches one training step, to know what the structure of a model cannot tell.

Hooks sit on the modules of a :class:`Structure` for the length of one step. They tell which inputs asked for a
gradient, which layers ran how often for each run of the model, which saw fewer rows than there are tokens (a pooler),
and which were computed again in backward. Modules inside of a compiled graph are left alone: hooks would be traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.compilation.block import CompiledBlock
from lightning_liger.compilation.recorded import RecordedBlock
from lightning_liger.meter.structure import Structure
from lightning_liger.padding.plain_decoder.ragged import RaggedTensor, rows_of
from lightning_liger.parallel.recompute import Recomputed
from lightning_liger.patching import Rebound, calls_compiled, inside_compiled


@dataclass
class _Seen:
    calls: int = 0
    again: int = 0
    rows: int = 0
    gradient: bool = False
    reentrant: bool = False


@dataclass
class Observation:
    """Of one model during one step.

    Attributes:
        model: runs of it are counted by a hook as well, unless ``runs_once``, which a LightningModule does.
        structure: what was read from its modules.
        dtype: in which products are computed; None before one was seen.
    """

    model: nn.Module
    structure: Structure
    runs_once: bool = False
    dtype: torch.dtype | None = None
    _runs: int = 0
    _seen: dict[nn.Module, _Seen] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _order: dict[nn.Module, int] = field(default_factory=dict)
    _stretch: nn.Module | None = None
    _last: set[nn.Module] = field(default_factory=set)

    def begin(self) -> None:
        compiled = inside_compiled(self.model) | _inside_graphs(self.model)
        modules = [m for m, _ in (*self.structure.products, *self.structure.attentions) if m not in compiled]
        if self.model in compiled or not modules or calls_compiled(self.model):
            return
        self._order = {m: i for i, (m, _) in enumerate(self.structure.products)}
        if self.runs_once:
            self._runs = 1
        else:
            self._handles.append(self.model.register_forward_pre_hook(self._count_run))
        for module in dict.fromkeys(modules):
            self._seen[module] = _Seen()
            self._handles.append(module.register_forward_pre_hook(self._note, with_kwargs=True))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _count_run(self, module: nn.Module, args: Any) -> None:
        self._runs += torch._C._current_graph_task_id() == -1

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        seen = self._seen[module]
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if torch._C._current_graph_task_id() != -1:
            seen.again += 1
            self._note_stretch(module)
        else:
            seen.calls += 1
            seen.reentrant = not torch.is_grad_enabled()
            if tensors and tensors[0].dim() > 0:
                first = tensors[0]
                rows = rows_of(first) if isinstance(first, RaggedTensor) else first  # its shape is the padded batch's
                seen.rows += rows.shape[:-1].numel()
        floating = [t for t in tensors if t.is_floating_point()]
        if self.dtype is None and floating:
            kind = floating[0].device.type
            self.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else floating[0].dtype
        seen.gradient = seen.gradient or (torch.is_grad_enabled() and any(t.requires_grad for t in floating))

    def _note_stretch(self, module: nn.Module) -> None:
        """Which product is the last of a block that is computed again: blocks are, from the last one to the first."""
        if module not in self._order:
            return
        if self._stretch is not None and self._order[module] <= self._order[self._stretch]:
            self._last.add(self._stretch)
        self._stretch = module

    def learnt(self, positions: int) -> Structure:
        """The structure as the step has shown it.

        Args:
            positions: what all runs of the step computed together.
        """
        # checkpointing that is not reentrant stops before the last product, whose result nobody asks for
        last = self._last | ({self._stretch} if self._stretch is not None else set())
        kept = self._kept(positions) | {m for m in last if not self._seen[m].reentrant}
        checkpointed = {m for block in self.model.modules() if any(_recomputed(block)) for m in block.modules()}
        ran = {m for m, s in self._seen.items() if s.calls}
        by_weight = {m.out_proj for m in ran if isinstance(m, nn.MultiheadAttention)}
        known = sum(p.forward for m, p in self.structure.products if m in self._seen)
        # most of a model that did not run was run by something that calls no modules
        idle = sum(p.forward for m, p in self.structure.products if m in self._seen and m not in ran)
        dropped = self.runs_once or idle < 0.5 * known
        products = []
        for module, product in self.structure.products:
            seen = self._seen.get(module) if module in ran or dropped else None
            if seen is not None and seen.calls:
                # what the structure says of routed rows is true on average, and of experts computed for all tokens
                rows = product.rows if product.routed else seen.rows / positions
                again = 0.0 if module in kept else min(seen.again / seen.calls, 1.0)
                product = replace(product, rows=rows, input_gradient=seen.gradient, recomputed=again)
            elif seen is not None and not product.routed and module not in by_weight:
                product = replace(product, rows=0.0)  # the model has it, and did not run it
            elif seen is None and module in checkpointed:
                product = replace(product, recomputed=float(module not in kept))
            products.append((module, product))
        attentions = []
        for module, attention in self.structure.attentions:
            seen = self._seen.get(module) if module in ran or dropped else None
            if seen is not None and seen.calls:
                again = 0.0 if module in kept else min(seen.again / seen.calls, 1.0)
                gradient = seen.gradient or any(p.requires_grad for p in module.parameters())
                attention = replace(attention, gradient=gradient, recomputed=again, times=seen.calls / self._runs)
            elif seen is not None:
                continue
            elif module in checkpointed:
                attention = replace(attention, recomputed=float(module not in kept))
            attentions.append((module, attention))
        unknown = self.structure.unknown
        if self.structure.attentions and not attentions:
            unknown += (f"no attention layer of {type(self.model).__name__} ran under its name",)
        return Structure(tuple(products), tuple(attentions), unknown)

    def _kept(self, tokens: int) -> set[nn.Module]:
        """Modules that run a second time for nothing: selective checkpointing has kept what they give."""
        found: set[nn.Module] = set()
        for block in self.model.modules():
            for binding in _recomputed(block):
                level, inside = binding.keeps(tokens), set(block.modules())
                products = [m for m, _ in self.structure.products if m in inside]
                found |= {m for i, m in enumerate(products) if level.all or level.keeps_product(i)}
                found |= {m for m, _ in self.structure.attentions if m in inside and (level.all or level.attention)}
        return found


def _inside_graphs(model: nn.Module) -> set[nn.Module]:
    """Blocks that run as compiled code or recorded graphs, in which a hook would be traced or never called."""
    kinds = (CompiledBlock, RecordedBlock)
    blocks = (m for m in model.modules() if any(isinstance(b, kinds) for b in _bindings(m)))
    return {m for block in blocks for m in block.modules()}


def _recomputed(block: nn.Module) -> Iterator[Recomputed]:
    return (b for b in _bindings(block) if isinstance(b, Recomputed))


def _bindings(module: nn.Module) -> Iterator[Rebound]:
    binding = module.__dict__.get("forward")
    while isinstance(binding, Rebound):
        yield binding
        binding = binding.previous
