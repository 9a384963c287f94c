"""Rotary embeddings as modules that turn one tensor and know the angles themselves (torchtune)."""

from __future__ import annotations

import copy
import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.kernels.device import autocast_dtype, stands_aside
from lightning_liger.kernels.registry import Dtypes, KernelBinding, KernelPatch
from lightning_liger.kernels.report import OpReport
from lightning_liger.kernels.rotary import KERNELS
from lightning_liger.kernels.rotary_forms import from_bhsd, to_bhsd
from lightning_liger.kernels.rotation import rope
from lightning_liger.kernels.standin import defined_by, stand_in
from lightning_liger.kernels.surroundings import undisturbed
from lightning_liger.patching import Switch

_SIZE_NAMES = ("dim", "head_dim", "d_head", "rotary_dim", "rope_dim", "dim_head")


@dataclass(frozen=True)
class RotaryModuleSpec:
    """``layout``: ``"bshd"`` or ``"bhsd"``; ``pairs``, ``wide``: see :func:`lightning_liger.kernels.rotation.rope`."""

    layout: str
    pairs: str
    wide: bool


class RotaryModuleBinding(KernelBinding):
    """The angles are read off the module itself: what it makes of ``(1, 0)`` in every pair is ``(cos, sin)``.

    So caches, scaling and positions stay the module's business, whatever they are called; one head more or less is
    little beside all those that the kernel turns.
    """

    by_row = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not args:
            return self.aside("not called with a tensor first", *args, **kwargs)
        x, *others = args
        spec: RotaryModuleSpec = self.spec
        if reason := stands_aside(x):
            return self.aside(reason, *args, **kwargs)
        out = self.dtypes.get((x.dtype, x.dtype, autocast_dtype(x.device)))
        if x.dim() != 4 or x.shape[-1] % 2 or out is None:
            return self.aside("not called with (B, S, heads, D) in a dtype that was compared", *args, **kwargs)
        rows = to_bhsd(x, spec.layout)
        probe = torch.zeros(rows.shape[0], 1, *rows.shape[2:], device=x.device)
        half = x.shape[-1] // 2
        first, second = (
            (slice(half), slice(half, None)) if spec.pairs == "halves" else (slice(0, None, 2), slice(1, None, 2))
        )
        probe[..., first] = 1.0
        with torch.no_grad():
            turned = to_bhsd(self.original(from_bhsd(probe, spec.layout), *others, **kwargs), spec.layout)[:, 0].float()
        self.ran()
        cos, sin = turned[..., first], turned[..., second]
        dtype = torch.float32 if spec.wide else x.dtype
        made = rope(rows, probe, cos.to(dtype), sin.to(dtype), x.shape[-1], spec.pairs, spec.wide)[0]
        return from_bhsd(made, spec.layout).to(out)


class RotaryModulePatch(KernelPatch):
    op = "rope"
    title = "RoPE"
    kernels = KERNELS

    def match(self, module: nn.Module) -> bool:
        name = type(module).__name__.lower()
        if "rotary" not in name and "rope" not in name:
            return False
        if next(itertools.chain(module.parameters(), module.children()), None) is not None:
            return False
        # (x), (x, *, input_pos=None), …: what needs more does something else
        parameters = list(inspect.signature(defined_by(module).forward).parameters.values())[1:]
        return bool(parameters) and all(p.default is not p.empty for p in parameters[1:] if p.kind is not p.VAR_KEYWORD)

    def is_named(self, module: nn.Module) -> bool:
        """Only modules that give back a tensor of the same shape: others make angles."""
        return self._example(module, torch.device("cpu")) is not None

    def candidates(self, module: nn.Module) -> list[RotaryModuleSpec]:
        return [
            RotaryModuleSpec(layout, pairs, wide)
            for pairs, wide in (("halves", False), ("halves", True), ("neighbours", True))
            for layout in ("bshd", "bhsd")
        ]

    def trial(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
        found = self._example(module, device)
        if found is None:
            raise RuntimeError("it turns no tensor of a size that its attributes name")
        return found[0], (found[1].requires_grad_(),)

    def _example(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, Tensor] | None:
        with undisturbed(device):
            return self._found(module, device)

    def _found(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, Tensor] | None:
        made = stand_in(module, {}, {})
        made.__dict__["_buffers"] = {
            n: None if b is None else b.detach().to(device) for n, b in module._buffers.items()
        }
        sizes = [v for n in _SIZE_NAMES if isinstance(v := getattr(module, n, None), int)]
        sizes += [2 * b.shape[0] for b in module._buffers.values() if b is not None and b.dim() == 1]
        for size in dict.fromkeys(sizes):
            # sequence and heads are told apart by the fact that both turn differently, so neither is 1
            x = torch.randn(2, 5, 4, size).to(device)
            try:
                with torch.no_grad():
                    out = defined_by(made).forward(copy.deepcopy(made), x)
            except Exception:  # another size, or another kind of module
                continue
            if isinstance(out, Tensor) and out.shape == x.shape:
                return made, x
        return None

    def cast(
        self, trial: nn.Module, inputs: tuple[Tensor, ...], x: torch.dtype, weight: torch.dtype
    ) -> tuple[nn.Module, tuple[Tensor, ...]]:
        # the module's own buffers keep their dtype: the angles come from them either way
        return copy.deepcopy(trial), tuple(i.detach().to(x).requires_grad_() for i in inputs)

    def binding(self, module: nn.Module, switch: Switch, spec: Any, report: OpReport, dtypes: Dtypes) -> KernelBinding:
        return RotaryModuleBinding(module, switch, spec, report, dtypes)
