"""RMSNorm and LayerNorm, whatever they are called and wherever they round."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.kernels.device import autocast_dtype, stands_aside
from lightning_liger.kernels.functions import layer_norm, rms_norm
from lightning_liger.kernels.registry import Dtypes, KernelBinding, KernelPatch
from lightning_liger.kernels.report import OpReport
from lightning_liger.kernels.standin import defined_by, rows, stand_in
from lightning_liger.patching import Switch

_EPS_NAMES = ("variance_epsilon", "eps", "norm_eps", "epsilon", "layer_norm_eps", "_eps")
_COMMON_EPS = (1e-6, 1e-5, 1e-8)
_LARGEST = 65536  # one program of the kernels handles one row


@dataclass(frozen=True)
class RMSNormSpec:
    """``eps=None``: the machine epsilon of the input's dtype, as in ``torch.nn.RMSNorm(eps=None)``."""

    weight: str | None
    eps: float | None
    offset: float
    casting_mode: str


@dataclass(frozen=True)
class LayerNormSpec:
    weight: str
    bias: str | None
    eps: float
    offset: float = 0.0


def takes_gate(module: nn.Module) -> bool:
    """Whether ``forward`` is ``(x, gate)``."""
    parameters = list(inspect.signature(defined_by(module).forward).parameters.values())[1:]
    return len(parameters) == 2 and parameters[1].name in ("gate", "z")


class NormBinding(KernelBinding):
    def prepare(self, x: Any, weight: Tensor | None) -> tuple[str, torch.dtype | None, torch.dtype | None]:
        """``(why not, dtype to compute in, dtype of the output)``."""
        if reason := stands_aside(x):
            return reason, None, None
        if weight is None:
            weight_dtype = x.dtype
        else:
            if type(weight) not in (Tensor, nn.Parameter):
                return f"its weight is a {type(weight).__name__}", None, None
            if weight.shape != x.shape[-1:] or weight.device != x.device:
                return "its weight is not in one piece on the input's device", None, None
            weight_dtype = weight.dtype
        out = self.dtypes.get((x.dtype, weight_dtype, autocast_dtype(x.device)))
        if out is None:
            return f"the comparison has no {x.dtype} input with {weight_dtype} weight", None, None
        # Kernels were compared with input and weight of one dtype; a mixture is computed in the wider one.
        return "", torch.promote_types(torch.promote_types(x.dtype, weight_dtype), out), out


class RMSNormBinding(NormBinding):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return self.aside("not called with one tensor", *args, **kwargs)
        spec: RMSNormSpec = self.spec
        (x,) = args
        weight = getattr(self.module, spec.weight) if spec.weight else None
        reason, dtype, out = self.prepare(x, weight)
        if reason:
            return self.aside(reason, x)
        assert dtype is not None
        self.ran()
        eps = torch.finfo(x.dtype).eps if spec.eps is None else spec.eps
        scale = None if weight is None else weight.to(dtype)
        return rms_norm(x.to(dtype), scale, eps, spec.offset, spec.casting_mode).to(out)


class LayerNormBinding(NormBinding):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return self.aside("not called with one tensor", *args, **kwargs)
        spec: LayerNormSpec = self.spec
        (x,) = args
        weight = getattr(self.module, spec.weight)
        reason, dtype, out = self.prepare(x, weight)
        if reason:
            return self.aside(reason, x)
        assert dtype is not None
        bias = getattr(self.module, spec.bias) if spec.bias else torch.zeros_like(weight, requires_grad=False)
        self.ran()
        scale = weight + spec.offset if spec.offset else weight
        return layer_norm(x.to(dtype), scale.to(dtype), bias.to(dtype), spec.eps).to(out)


class _NormPatch(KernelPatch):
    def is_named(self, module: nn.Module) -> bool:
        name = type(module).__name__.lower()
        return "norm" in name or "rms" in name

    def _vectors(self, module: nn.Module) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in module._parameters.items() if p is not None}

    def _is_leaf(self, module: nn.Module) -> bool:
        if module._modules or any(b is not None for b in module._buffers.values()):
            return False
        shapes = self._vectors(module).values()
        return all(len(s) == 1 and 1 < s[0] <= _LARGEST for s in shapes) and len(set(shapes)) <= 1

    def trial(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
        shapes = self._vectors(module)
        width = next(iter(shapes.values()))[0] if shapes else 64
        made = stand_in(module, {n: torch.randn(s).to(device) for n, s in shapes.items()}, {})
        # parameters that the module registered as None keep their names
        made._parameters.update({n: None for n, p in module._parameters.items() if p is None})
        return made, (rows((1e-3, 0.1, 1.0, 1.0, 30.0), width, device),)


def _eps_values(module: nn.Module) -> list[float]:
    given = [getattr(module, name, None) for name in _EPS_NAMES]
    found = [float(v) for v in given if isinstance(v, float)]
    others = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2]
    return list(dict.fromkeys([*found, *others, *_COMMON_EPS]))


class RMSNormPatch(_NormPatch):
    """Root-mean-square norms: weight, weight + 1, or none; rounded before or after the scale."""

    op = "rms_norm"
    title = "RMSNorm"
    kernels: tuple[str, ...] = ("_rms_norm_forward_kernel", "_rms_norm_backward_kernel")

    def match(self, module: nn.Module) -> bool:
        if not self._is_leaf(module) or len(self._vectors(module)) > 1 or isinstance(module, nn.LayerNorm):
            return False
        if takes_gate(module):
            return False
        if type(module).__module__.startswith("torch.nn."):
            return isinstance(module, nn.RMSNorm) and len(module.normalized_shape) == 1
        if not self._vectors(module):
            return self.is_named(module) and any(isinstance(getattr(module, n, None), float) for n in _EPS_NAMES)
        return True

    def candidates(self, module: nn.Module) -> list[Any]:
        return list(self._specs(module))

    def _specs(self, module: nn.Module) -> list[RMSNormSpec]:
        weight = next(iter(self._vectors(module)), None)
        eps: list[float | None] = list(_eps_values(module))
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            eps[:0] = [torch.finfo(torch.float32).eps, None]  # versions of torch differ about bf16
        offsets = (0.0, 1.0) if weight else (0.0,)
        return [RMSNormSpec(weight, e, o, mode) for e in eps[:4] for o in offsets for mode in ("llama", "gemma")]

    def binding(self, module: nn.Module, switch: Switch, spec: Any, report: OpReport, dtypes: Dtypes) -> KernelBinding:
        return RMSNormBinding(module, switch, spec, report, dtypes)


class LayerNormPatch(_NormPatch):
    """Layer norms over the last dimension, with or without bias."""

    op = "layer_norm"
    title = "LayerNorm"
    kernels = ("_layer_norm_forward_kernel", "_layer_norm_backward_kernel")

    def match(self, module: nn.Module) -> bool:
        if not self._is_leaf(module) or not 1 <= len(self._vectors(module)) <= 2:
            return False
        if type(module).__module__.startswith("torch.nn."):
            return isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1
        return self.is_named(module) and "rms" not in type(module).__name__.lower()

    def candidates(self, module: nn.Module) -> list[LayerNormSpec]:
        names = sorted(self._vectors(module), key=lambda n: n not in ("weight", "gamma", "scale", "g"))
        bias = names[1] if len(names) == 2 else None
        offsets = (0.0,) if type(module) is nn.LayerNorm else (0.0, 1.0)
        return [LayerNormSpec(names[0], bias, eps, offset) for eps in _eps_values(module)[:3] for offset in offsets]

    def binding(self, module: nn.Module, switch: Switch, spec: Any, report: OpReport, dtypes: Dtypes) -> KernelBinding:
        return LayerNormBinding(module, switch, spec, report, dtypes)
