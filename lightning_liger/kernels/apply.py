"""Finds the modules of a model that kernels fit, compares, and makes their bindings."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn

from lightning_liger.choices import KernelChoice
from lightning_liger.kernels import liger
from lightning_liger.kernels.check import Verdict, verify
from lightning_liger.kernels.device import trial_device, why_not
from lightning_liger.kernels.options import choice_for, why_off
from lightning_liger.kernels.registry import KernelBinding, KernelPatch, known_ops, registered
from lightning_liger.kernels.report import KernelReport, OpReport
from lightning_liger.kernels.rotary import RopePatch, rotary_functions
from lightning_liger.kernels.rotary_angles import angles_problem, repeated_angles
from lightning_liger.kernels.standin import defined_by
from lightning_liger.patching import Rebound, Switch, inside_compiled, live_binding

# One H200, bf16: at hidden size 896 single-op kernels made a step 17% longer, at 3584 they made it 6% shorter
# (docs/performance.md). Between the two nothing was measured.
_GPU_BOUND_WIDTH = 2048


class Kernels:
    """The kernels of one ``accelerate`` call.

    Args:
        choice: the ``kernels`` option.
        report: filled while applying, counted into while running.
        switch: turns all bindings on and off.
    """

    def __init__(self, choice: KernelChoice, report: KernelReport, switch: Switch) -> None:
        self.choice = choice
        self.report = report
        self.switch = switch
        self._off: dict[str, str] = {}
        self._rests = ""
        # weak: the registry of accelerated modules must not keep a module alive through its own entry
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def bindings(self, module: nn.Module, timed: bool = False) -> list[KernelBinding]:
        """New bindings for what ``module`` holds now, not bound yet; modules that were looked at before are skipped.

        Args:
            timed: the use of those that ``"auto"`` decides about will be timed; where the width speaks against them
                they rest until then.
        """
        rule = why_auto_is_off(module)
        auto = "" if timed and torch.cuda.is_available() else rule
        self._rests = rule if not auto else ""
        self._off = {op: why_off(self.choice, op, auto) for op in known_ops()}
        if all(self._off.values()):
            self.report.off = auto if auto in self._off.values() else f"switched off (kernels={self.choice})"
        else:
            self.report.off = why_not()
        return [] if self.report.off else list(self._find(module))

    def left_open(self) -> set[str]:
        """The ops whose use the option leaves to ``"auto"``."""
        return {op for op in known_ops() if choice_for(self.choice, op) == "auto"}

    def _find(self, module: nn.Module) -> Iterator[KernelBinding]:
        patches = registered()
        new = [m for m in module.modules() if m not in self._seen]
        self._seen.update(new)
        known = _Known(module if new else None)
        compiled = inside_compiled(module)
        device = trial_device()
        verdicts: dict[object, Verdict] = {}
        angles: list[tuple[str, set[str]]] | None = None
        for candidate in new:
            matching = [p for p in patches if p.match(candidate)]
            if not matching:
                continue
            if angles is None and any(isinstance(p, RopePatch) for p in matching):
                angles = repeated_angles(module)
            binding = self._try(candidate, matching, known, compiled, device, verdicts, angles or [])
            if binding is not None:
                yield binding

    def _try(
        self,
        module: nn.Module,
        patches: list[KernelPatch],
        known: _Known,
        compiled: set[nn.Module],
        device: torch.device,
        verdicts: dict[object, Verdict],
        angles: list[tuple[str, set[str]]],
    ) -> KernelBinding | None:
        """The binding of the first patch that computes the same; otherwise one refusal in the report."""
        hint = known.op(module)
        name = defined_by(module).__name__
        refusals: list[tuple[KernelPatch, str]] = []
        for patch in sorted(patches, key=lambda p: p.op != hint):
            reason = _foreign(module, self.switch) or ("compiled with torch.compile" if module in compiled else "")
            reason = reason or patch.refusal(module)
            if not reason and isinstance(patch, RopePatch):
                reason = angles_problem(list(patch.forms(module).values()), angles)
            if not reason and self._off[patch.op]:
                refusals.append((patch, self._off[patch.op]))
                continue
            if reason:
                refusals.append((patch, f"{name}: {reason}"))
                continue
            key = (patch, patch.key(module))
            if key not in verdicts:
                verdicts[key] = verify(patch, module, device)
            verdict = verdicts[key]
            if verdict.spec is None:
                refusals.append((patch, f"{name} {verdict.reason}"))
                continue
            report = self._op(patch)
            report.found += 1
            report.applied += 1
            source = "liger" if hint == patch.op else "structural"
            report.sources[source] = report.sources.get(source, 0) + 1
            binding = patch.binding(module, self.switch, verdict.spec, report, verdict.dtypes)
            binding.op = patch.op
            if self._rests and patch.op in self.left_open():
                binding.rest(self._rests)
            return binding
        worth_telling = [(p, why) for p, why in refusals if p.op == hint or p.is_named(module)]
        if worth_telling:
            patch, why = worth_telling[0]
            self._op(patch).found += 1
            self._op(patch).refuse(why)
        return None

    def _op(self, patch: KernelPatch) -> OpReport:
        return self.report.op(patch.op, patch.title, patch.kernels)


class _Known:
    """Liger's knowledge about all transformers models inside a module."""

    def __init__(self, module: nn.Module | None) -> None:
        self._ops: dict[nn.Module, str] = {}
        self._rotary: set[str] = set()
        covered: set[nn.Module] = set()
        for model in module.modules() if module is not None else ():
            if model in covered or not hasattr(model, "config") or not _is_transformers(model):
                continue
            notes = liger.knowledge(model)
            if notes is None:
                continue
            self._ops.update(notes.ops)
            self._rotary |= notes.rotary
            if not notes.error:
                covered.update(model.modules())

    def op(self, module: nn.Module) -> str | None:
        if module in self._ops:
            return self._ops[module]
        if self._rotary:
            where = defined_by(module).__module__.rpartition(".")[2]
            return "rope" if any(f"{where}.{name}" in self._rotary for name in rotary_functions(module)) else None
        return None


def _is_transformers(module: nn.Module) -> bool:
    return any(k.__name__ == "PreTrainedModel" for k in type(module).__mro__)


def _foreign(module: Any, switch: Switch) -> str:
    """Who else took over this module's forward, or ``""``."""
    live_binding(module, "forward", switch)  # drops what a copied module brought along
    found = module.__dict__.get("forward")
    if isinstance(found, Rebound):
        return "accelerated by another accelerate() call"
    function = getattr(found, "__func__", found)
    # an unpickled module carries its class's own method where a binding was
    if found is not None and not (function is type(module).forward and getattr(found, "__self__", None) is module):
        return f"its forward was replaced by {getattr(function, '__qualname__', type(found).__name__)}"
    if defined_by(module).__module__.startswith("liger_kernel"):
        return "is Liger's already"
    forward = defined_by(module).forward
    modules = {k.__module__ for k in type(module).__mro__}
    if getattr(forward, "__module__", None) not in modules:
        return f"its class's forward was replaced by {forward.__module__}.{forward.__qualname__}"
    return ""


def why_auto_is_off(module: nn.Module) -> str:
    """Why ``kernels="auto"`` leaves this module to its own code, or ``""``."""
    if not torch.cuda.is_available():
        return "no CUDA device (kernels='auto')"
    if (width := _width(module)) < _GPU_BOUND_WIDTH:
        return f"hidden size {width}: the step is bound by launches, which kernels only add to (kernels='auto')"
    return ""


def _width(module: nn.Module) -> int:
    """The hidden size: that of the widest embedding."""
    return max((m.embedding_dim for m in module.modules() if isinstance(m, nn.Embedding)), default=0)
