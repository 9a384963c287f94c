"""Rotary embeddings, where an attention layer's ``forward`` calls functions of its Python module for them.

Such a function is shared by every layer and every model of the process, so it stays as it is. The one layer's forward
runs instead on a copy of its code whose globals name another function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.configs import config_value
from lightning_liger.kernels.rebuilt import with_globals
from lightning_liger.kernels.registry import Dtypes, KernelBinding, KernelPatch, strict
from lightning_liger.kernels.report import OpReport
from lightning_liger.kernels.rotary_forms import Form, call_of, example, form_of
from lightning_liger.kernels.rotary_function import RopeFunction
from lightning_liger.kernels.standin import defined_by
from lightning_liger.patching import Switch

KERNELS = ("_triton_rope", "_llama4_rope_kernel")
_HEAD_DIM = 24  # no power of two, so that the masks of the kernels are exercised too


@dataclass(frozen=True)
class RopeSpec:
    """The rotary functions that a forward names, with what each computes; ``wide``: in fp32 whatever the dtypes are."""

    forms: tuple[tuple[str, Form], ...]
    wide: bool


def rotary_functions(layer: nn.Module) -> dict[str, Callable[..., Any]]:
    """The rotary functions that the layer's forward calls by a global name.

    There are several where the configuration decides which: all are looked at, so that the one that is called is among
    them. Helpers that rotate nothing (``rope_cache(length)``) only count where there is nothing else.
    """
    forward = inspect.unwrap(defined_by(layer).forward)
    if not isinstance(forward, FunctionType):
        return {}
    found = {}
    for name in _names(forward.__code__):
        value = forward.__globals__.get(name)
        if callable(value) and not isinstance(value, type) and ("rotary" in name.lower() or "rope" in name.lower()):
            found[name] = value
    rotating = {name: f for name, f in found.items() if call_of(f) is not None}
    return rotating or found


def _names(code: CodeType) -> list[str]:
    """Names of globals and attributes that the code, or a comprehension inside it, uses."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return list(dict.fromkeys([*code.co_names, *(n for c in inner for n in _names(c))]))


def _head_dim(layer: nn.Module) -> int:
    for owner in (layer, getattr(layer, "config", None)):
        for name in ("head_dim", "head_size"):
            if isinstance(value := config_value(owner, name), int):
                return value
    return _HEAD_DIM


class RopeBinding(KernelBinding):
    """``forward`` of an attention layer, with its rotary functions replaced for this layer alone."""

    by_row = False

    _forward: Callable[..., Any] | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward is None:
            functions = rotary_functions(self.module)
            replaced: dict[str, Any] = {
                name: RopeFunction(functions[name], form, self.spec.wide, self.dtypes, self.ran, self._aside)
                for name, form in self.spec.forms
            }
            self._forward = with_globals(defined_by(self.module).forward, replaced)
        return self._forward(self.module, *args, **kwargs)

    def _aside(self, reason: str) -> None:
        self.why = reason
        self.report.ran_original(f"{type(self.module).__name__}: {reason}")


class _RotaryTrial(nn.Module):
    """The rotary functions themselves as a module, each with its own share of the arguments."""

    def __init__(self, functions: list[tuple[str, Callable[..., Any], Form]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return self.run([f for _, f, _ in self.functions], args)

    def run(self, functions: list[Any], args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        out: list[Tensor] = []
        for function, (_, _, form) in zip(functions, self.functions, strict=True):
            n = form.call.arguments
            made = function(*args[:n])
            args = args[n:]
            out += [made] if isinstance(made, Tensor) else list(made)
        return tuple(out)


class RopePatch(KernelPatch):
    """Rotary embeddings as functions: pairs of entries are turned, ``(a, b) -> (a cos - b sin, b cos + a sin)``."""

    op = "rope"
    title = "RoPE"
    kernels = KERNELS

    def match(self, module: nn.Module) -> bool:
        # layers without positions (Llama 4, SmolLM 3) name the function and do not call it
        return getattr(module, "use_rope", True) and bool(list(module.children())) and bool(rotary_functions(module))

    def key(self, module: nn.Module) -> object:
        return (defined_by(module).forward, tuple(rotary_functions(module).items()), _head_dim(module))

    def forms(self, module: nn.Module) -> dict[str, Form | None]:
        return {name: form_of(f, _head_dim(module)) for name, f in rotary_functions(module).items()}

    def refusal(self, module: nn.Module) -> str:
        for name, function in rotary_functions(module).items():
            if getattr(function, "__module__", "").startswith("liger_kernel"):
                return f"{name} is Liger's already, for every model of this process"
            if call_of(function) is None:
                return f"{name}{_signature(function)} is not called with (q, k, cos, sin)"
            if form_of(function, _head_dim(module)) is None:
                return f"{name} does not turn pairs of entries by one angle per position"
        try:
            with_globals(defined_by(module).forward, dict(rotary_functions(module)))
        except ValueError as error:
            return str(error)
        return ""

    def candidates(self, module: nn.Module) -> list[RopeSpec]:
        forms = tuple((name, form) for name, form in self.forms(module).items() if form is not None)
        if all(form.pairs == "neighbours" for _, form in forms):
            return [RopeSpec(forms, True)]
        return [RopeSpec(forms, wide) for wide in (False, True)]

    def trial(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
        functions = []
        inputs: list[Tensor] = []
        forms = self.forms(module)
        for name, function in rotary_functions(module).items():
            form = forms[name]
            assert form is not None
            functions.append((name, function, form))
            # the narrower layout exercises more of the kernel
            states, angles = example(form.call, form.shapes[0], form.reads, form.part, _head_dim(module))
            inputs += [x.to(device).requires_grad_() for x in states] + [a.to(device) for a in angles]
        return _RotaryTrial(functions), tuple(inputs)

    def cast(
        self, trial: nn.Module, inputs: tuple[Tensor, ...], x: torch.dtype, weight: torch.dtype
    ) -> tuple[nn.Module, tuple[Tensor, ...]]:
        def moved(t: Tensor) -> Tensor:
            if t.is_complex():
                return t
            return t.detach().to(x).requires_grad_() if t.requires_grad else t.to(weight)

        return trial, tuple(moved(t) for t in inputs)

    def candidate(self, trial: nn.Module, spec: Any, dtypes: Dtypes) -> Callable[..., Any]:
        assert isinstance(trial, _RotaryTrial)
        report = OpReport(self.title)
        replaced = [
            RopeFunction(f, form, spec.wide, dtypes, lambda: None, report.ran_original)
            for _, f, form in trial.functions
        ]
        return strict(lambda *args: trial.run(replaced, args), report)

    def binding(self, module: nn.Module, switch: Switch, spec: Any, report: OpReport, dtypes: Dtypes) -> KernelBinding:
        return RopeBinding(module, switch, spec, report, dtypes)


def _signature(function: Callable[..., Any]) -> str:
    try:
        return f"({', '.join(inspect.signature(function).parameters)})"
    except (TypeError, ValueError):
        return "(…)"
