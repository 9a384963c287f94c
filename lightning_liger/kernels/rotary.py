"""Rotary embeddings, where an attention layer's ``forward`` calls a function of its Python module for them.

That function is shared by every layer and every model of the process, so it stays as it is. The one layer's forward runs
instead on a copy of its code whose globals name another function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.kernels.device import autocast_dtype, stands_aside
from lightning_liger.kernels.functions import rope
from lightning_liger.kernels.rebuilt import with_globals
from lightning_liger.kernels.registry import Dtypes, KernelBinding, KernelPatch, strict
from lightning_liger.kernels.report import OpReport
from lightning_liger.kernels.standin import defined_by
from lightning_liger.patching import Switch

_HEAD_DIM = 24  # no power of two, so that the masks of the kernel are exercised too


@dataclass(frozen=True)
class RopeSpec:
    """How a rotary function is called, and which widths of ``cos`` it was compared with.

    Attributes:
        name: of the function among the globals of ``forward``.
        single: ``f(x, cos, sin)`` instead of ``f(q, k, cos, sin)``.
        half: ``cos`` has one entry per pair (``D / 2``), not two equal halves.
        partial: only the first ``R`` of ``D`` entries are rotated when ``cos`` has ``R``.
    """

    name: str
    single: bool
    half: bool = False
    partial: bool = False

    def rotary_dim(self, head_dim: int, width: int) -> int | None:
        """How many entries of a head are rotated, or None for a combination that was not compared."""
        if self.half:
            return head_dim if width * 2 == head_dim else None
        if width == head_dim or (self.partial and width < head_dim):
            return width
        return None


def rotary_function(layer: nn.Module) -> tuple[str, Callable[..., Any]] | None:
    """``(name, function)`` of the rotary function that the layer's forward calls by a global name, or None.

    Of several (for different configurations of one class), the first that rotates halves.
    """
    forward = inspect.unwrap(defined_by(layer).forward)
    if not isinstance(forward, FunctionType):
        return None
    found = []
    for name in _names(forward.__code__):
        value = forward.__globals__.get(name)
        if callable(value) and not isinstance(value, type) and ("rotary" in name.lower() or "rope" in name.lower()):
            found.append((name, value))
    if len(found) > 1:
        found.sort(key=lambda f: _is_single(f[1]) is None or not _layouts(f[1], _head_dim(layer)))
    return found[0] if found else None


def _names(code: CodeType) -> list[str]:
    """Names of globals and attributes that the code, or a comprehension inside it, uses."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return list(dict.fromkeys([*code.co_names, *(n for c in inner for n in _names(c))]))


def _head_dim(layer: nn.Module) -> int:
    for owner in (layer, getattr(layer, "config", None)):
        for name in ("head_dim", "head_size"):
            if isinstance(value := getattr(owner, name, None), int):
                return value
    return _HEAD_DIM


def _is_single(function: Callable[..., Any]) -> bool | None:
    """Whether the signature is ``(x, cos, sin, …)``; None for one that is neither this nor ``(q, k, cos, sin, …)``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    names = [p.name for p in parameters]
    for single, first in ((True, 1), (False, 2)):
        rest = parameters[first + 2 :]
        if names[first : first + 2] == ["cos", "sin"] and all(p.default is not p.empty for p in rest):
            return single
    return None


class RopeFunction:
    """The replacement of a rotary function; hands anything unusual to ``original``."""

    def __init__(self, original: Callable[..., Any], spec: RopeSpec, report: OpReport, dtypes: Dtypes) -> None:
        self.original = original
        self.spec = spec
        self.report = report
        self.dtypes = dtypes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        n = 1 if self.spec.single else 2
        reason = "called with further arguments" if len(args) != n + 2 or kwargs else self._reason(args)
        if reason:
            self.report.ran_original(reason)
            return self.original(*args, **kwargs)
        *states, cos, sin = args
        q = states[0]
        rotary_dim = self.spec.rotary_dim(q.shape[-1], cos.shape[-1])
        assert rotary_dim is not None
        self.report.calls += 1
        out = self.dtypes[q.dtype, cos.dtype, autocast_dtype(q.device)]
        if self.spec.single:
            # the kernel always rotates two tensors: give it one head of zeros to go with
            nothing = q.new_zeros(q.shape[0], 1, q.shape[2], q.shape[3])
            return rope(q, nothing, cos, sin, rotary_dim)[0].to(out)
        q, k = rope(q, states[1], cos, sin, rotary_dim)
        return q.to(out), k.to(out)

    def _reason(self, args: tuple[Any, ...]) -> str:
        *states, cos, sin = args
        for x in args:
            if reason := stands_aside(x):
                return reason
        q = states[0]
        if any(x.dim() != 4 or x.shape[-1] != q.shape[-1] or x.dtype != q.dtype for x in states):
            return "queries and keys are no (B, heads, S, D) of one dtype"
        if any(x.shape[2] != q.shape[2] or x.shape[0] != q.shape[0] for x in states):
            return "queries and keys differ in length"
        if (
            cos.dim() != 3
            or cos.shape != sin.shape
            or cos.shape[1] != q.shape[2]
            or cos.shape[0] not in (1, q.shape[0])
        ):
            return "cos and sin are no (1 or B, S, R)"
        if cos.requires_grad or sin.requires_grad or cos.dtype != sin.dtype:
            return "cos and sin are trained, or of two dtypes"
        if (width := self.spec.rotary_dim(q.shape[-1], cos.shape[-1])) is None or width % 2:
            return f"head size {q.shape[-1]} with {cos.shape[-1]} rotary entries was not compared"
        if (q.dtype, cos.dtype, autocast_dtype(q.device)) not in self.dtypes:
            return f"the comparison has no {q.dtype} input with {cos.dtype} angles"
        return ""


class RopeBinding(KernelBinding):
    """``forward`` of an attention layer, with the rotary function replaced for this layer alone."""

    _forward: Callable[..., Any] | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward is None:
            found = rotary_function(self.module)
            assert found is not None
            replacement = RopeFunction(found[1], self.spec, self.report, self.dtypes)
            self._forward = with_globals(defined_by(self.module).forward, found[0], replacement)
        return self._forward(self.module, *args, **kwargs)


class _RotaryTrial(nn.Module):
    """The rotary function itself as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def _example(layout: str, head_dim: int, device: torch.device, single: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    """Random states ``(2, heads, 5, head_dim)``, with ``cos`` and ``sin`` in the layout."""
    pairs = head_dim // 2 if layout != "partial" else max(1, head_dim // 4)
    states = [torch.randn(2, heads, 5, head_dim).to(device) for heads in ((4,) if single else (4, 2))]
    angles = torch.randn(2, 5, pairs)
    angles = angles if layout == "half" else torch.cat((angles, angles), -1)
    return states, angles.cos().to(device), angles.sin().to(device)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """The formula: halves of the rotated entries are turned, the rest stays."""
    width = x.shape[-1] if layout == "half" else cos.shape[-1]
    first, second, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
    c, s = cos[:, None, :, : width // 2], sin[:, None, :, : width // 2]
    return torch.cat((first * c - second * s, second * c + first * s, rest), -1)


@functools.lru_cache(256)
def _layouts(function: Callable[..., Any], head_dim: int) -> tuple[str, ...]:
    """For which layouts of ``cos`` the function does what the formula says."""
    layouts = []
    for layout in ("full", "partial", "half"):
        with torch.random.fork_rng(devices=[]):
            states, cos, sin = _example(layout, head_dim, torch.device("cpu"), bool(_is_single(function)))
        try:
            with torch.no_grad():
                out = function(*states, cos, sin)
        except Exception:  # these shapes mean nothing to it
            continue
        out = (out,) if isinstance(out, Tensor) else out
        expected = [_rotated(x, cos, sin, layout) for x in states]
        if all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(out, expected, strict=True)):
            layouts.append(layout)
    return tuple(layouts)


class RopePatch(KernelPatch):
    """Rotary embeddings that turn halves of a head, ``(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)``."""

    op = "rope"
    title = "RoPE"
    kernels = ("_triton_rope",)

    def match(self, module: nn.Module) -> bool:
        return bool(list(module.children())) and rotary_function(module) is not None

    def key(self, module: nn.Module) -> object:
        found = rotary_function(module)
        assert found is not None
        return (defined_by(module).forward, *found, _head_dim(module))

    def refusal(self, module: nn.Module) -> str:
        found = rotary_function(module)
        assert found is not None
        name, function = found
        if getattr(function, "__module__", "").startswith("liger_kernel"):
            return f"{name} is Liger's already, for every model of this process"
        if _is_single(function) is None:
            return f"{name}{_signature(function)} is not called with (q, k, cos, sin)"
        if not _layouts(function, _head_dim(module)):
            return f"{name} does not turn the halves of (B, heads, S, D) tensors"
        try:
            with_globals(defined_by(module).forward, name, function)
        except ValueError as error:
            return str(error)
        return ""

    def candidates(self, module: nn.Module) -> list[RopeSpec]:
        name, function = rotary_function(module) or ("", lambda: None)
        layouts = _layouts(function, _head_dim(module))
        plain = RopeSpec(name, bool(_is_single(function)), partial="partial" in layouts)
        return [replace(plain, half=True)] if layouts == ("half",) else [plain]

    def trial(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
        found = rotary_function(module)
        assert found is not None
        layouts = _layouts(found[1], _head_dim(module))
        # the narrower layout exercises more of the kernel
        layout = "partial" if "partial" in layouts else (layouts or ("full",))[0]
        states, cos, sin = _example(layout, _head_dim(module), device, bool(_is_single(found[1])))
        return _RotaryTrial(found[1]), (*(x.requires_grad_() for x in states), cos, sin)

    def cast(
        self, trial: nn.Module, inputs: tuple[Tensor, ...], x: torch.dtype, weight: torch.dtype
    ) -> tuple[nn.Module, tuple[Tensor, ...]]:
        *states, cos, sin = inputs
        moved = tuple(s.detach().to(x).requires_grad_() for s in states)
        return trial, (*moved, cos.to(weight), sin.to(weight))

    def candidate(self, trial: nn.Module, spec: Any, dtypes: Dtypes) -> Callable[..., Any]:
        assert isinstance(trial, _RotaryTrial)
        report = OpReport(self.title)
        return strict(RopeFunction(trial.function, spec, report, dtypes), report)

    def binding(self, module: nn.Module, switch: Switch, spec: Any, report: OpReport, dtypes: Dtypes) -> KernelBinding:
        return RopeBinding(module, switch, spec, report, dtypes)


def _signature(function: Callable[..., Any]) -> str:
    try:
        return f"({', '.join(inspect.signature(function).parameters)})"
    except (TypeError, ValueError):
        return "(…)"
