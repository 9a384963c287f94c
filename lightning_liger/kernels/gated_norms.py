"""RMSNorm with a gate, ``norm(x) * silu(gate)``: the norm in one kernel, the product in another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.kernels.device import stands_aside
from lightning_liger.kernels.functions import gated, rms_norm
from lightning_liger.kernels.norms import NormBinding, RMSNormPatch, RMSNormSpec, takes_gate
from lightning_liger.kernels.registry import Dtypes, KernelBinding
from lightning_liger.kernels.report import OpReport
from lightning_liger.kernels.standin import rows
from lightning_liger.patching import Switch


@dataclass(frozen=True)
class GatedRMSNormSpec:
    """``gate_first``: the product is normalised (Mamba 2), not the other way round (Qwen 3 Next)."""

    norm: RMSNormSpec
    gate_first: bool


class GatedRMSNormBinding(NormBinding):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or kwargs:
            return self.aside("not called with two tensors", *args, **kwargs)
        spec: GatedRMSNormSpec = self.spec
        x, gate = args
        weight = getattr(self.module, spec.norm.weight or "")
        reason, dtype, out = self.prepare(x, weight)
        reason = reason or stands_aside(gate) or ("" if gate.shape == x.shape else "the gate has another shape")
        if reason:
            return self.aside(reason, x, gate)
        assert dtype is not None and spec.norm.eps is not None
        self.ran()
        x, gate, scale = x.to(dtype), gate.to(dtype), weight.to(dtype)
        norm = (spec.norm.eps, spec.norm.offset, spec.norm.casting_mode)
        if spec.gate_first:
            return rms_norm(gated("silu", gate, x, overwrite=False), scale, *norm).to(out)
        return gated("silu", gate, rms_norm(x, scale, *norm), overwrite=False).to(out)


class GatedRMSNormPatch(RMSNormPatch):
    kernels = (*RMSNormPatch.kernels, "_swiglu_forward_kernel", "_swiglu_backward_kernel")

    def match(self, module: nn.Module) -> bool:
        return (
            self.is_named(module) and self._is_leaf(module) and len(self._vectors(module)) == 1 and takes_gate(module)
        )

    def candidates(self, module: nn.Module) -> list[Any]:
        return [GatedRMSNormSpec(s, first) for s in self._specs(module) if s.eps is not None for first in (False, True)]

    def trial(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
        made, (x,) = super().trial(module, device)
        return made, (x, rows((1.0,) * x.shape[1], x.shape[-1], device))

    def binding(self, module: nn.Module, switch: Switch, spec: Any, report: OpReport, dtypes: Dtypes) -> KernelBinding:
        return GatedRMSNormBinding(module, switch, spec, report, dtypes)
