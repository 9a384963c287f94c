"""Mixture-of-experts layers that hold all experts in two tensors: one grouped matrix product instead of a loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.kernels.device import autocast_dtype, interpreted, stands_aside
from lightning_liger.kernels.functions import experts
from lightning_liger.kernels.registry import Dtypes, KernelBinding, KernelPatch
from lightning_liger.kernels.report import OpReport
from lightning_liger.kernels.standin import rows, stand_in
from lightning_liger.patching import Switch


def compared_dtypes() -> tuple[torch.dtype, ...]:
    """On a GPU the grouped products round fp32 to TF32, which torch only does when it is told to."""
    return (torch.float32, torch.bfloat16) if interpreted() else (torch.bfloat16,)


@contextmanager
def _one_configuration() -> Iterator[None]:
    """Tuning some 200 variants for the stand-in's sizes would take minutes, and tell nothing about real ones."""
    from liger_kernel.ops import fused_moe_kernels

    tuned = [k for k in vars(fused_moe_kernels).values() if len(getattr(k, "configs", ())) > 1]
    before = [kernel.configs for kernel in tuned]
    try:
        for kernel in tuned:
            kernel.configs = kernel.configs[:1]
        yield
    finally:
        for kernel, configs in zip(tuned, before, strict=True):
            kernel.configs = configs


_UP, _DOWN = "gate_up_proj", "down_proj"


class ExpertsBinding(KernelBinding):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 3 or kwargs:
            return self.aside("called in another way than (hidden_states, index, weights)", *args, **kwargs)
        x, index, weights = args
        up, down = getattr(self.module, _UP), getattr(self.module, _DOWN)
        reason = stands_aside(x) or stands_aside(weights) or self._reason(x, index, up, down)
        if reason:
            return self.aside(reason, x, index, weights)
        autocast = autocast_dtype(x.device)
        out = self.dtypes.get((x.dtype, up.dtype, autocast))
        dtype = autocast or x.dtype
        if out is None or (autocast is None and x.dtype != up.dtype):
            return self.aside(f"the comparison has no {x.dtype} input with {up.dtype} weights", x, index, weights)
        if dtype not in compared_dtypes():
            return self.aside("in fp32 the kernel would round to TF32", x, index, weights)
        self.ran()
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        k = index.shape[-1]
        result = experts(flat, up.to(dtype), down.to(dtype), index.reshape(-1, k).int(), weights.reshape(-1, k))
        return result.view(x.shape).to(out)

    def _reason(self, x: Tensor, index: Any, up: Any, down: Any) -> str:
        if type(up) not in (Tensor, nn.Parameter) or type(down) not in (Tensor, nn.Parameter):
            return f"its weights are a {type(up).__name__}"
        if up.shape[-1] != x.shape[-1] or up.device != x.device or up.dtype != down.dtype:
            return "its weights are not in one piece on the input's device"
        if getattr(self.module, "_is_expert_parallel", False):
            return "its experts are spread over several devices"
        return "" if type(index) is Tensor else "the expert index is not a plain tensor"


class ExpertsPatch(KernelPatch):
    """SwiGLU experts with weights ``(E, 2 I, H)`` and ``(E, H, I)``, as transformers 5 stores them."""

    op = "swiglu"
    title = "SwiGLU"
    kernels = ("_fused_up_proj_swiglu_kernel", "_fused_down_proj_kernel", "_moe_bwd_")

    def match(self, module: nn.Module) -> bool:
        # anything that looks like it: what cannot be replaced is worth its reason
        found = (module._parameters.get(name) for name in (_UP, _DOWN))
        if any(p is None or p.dim() != 3 for p in found):
            return False
        return not any(True for c in module.children() for _ in c.parameters())

    def refusal(self, module: nn.Module) -> str:
        found = {n: p for n, p in module._parameters.items() if p is not None}
        if set(found) != {_UP, _DOWN}:
            return f"the expert kernel has no place for {', '.join(sorted(set(found) - {_UP, _DOWN}))}"
        (e, double, h), (e2, h2, i) = found[_UP].shape, found[_DOWN].shape
        if (e, double, h) != (e2, 2 * i, h2):
            return "its weights are not stored as the expert kernel reads them, (E, 2 I, H) and (E, H, I)"
        for name in ("limit", "swiglu_limit"):
            if isinstance(value := getattr(module, name, None), (int, float)):
                return f"it clamps its gate at {name}={value}, which the expert kernel does not"
        return ""

    def candidates(self, module: nn.Module) -> list[str]:
        return ["silu"]

    def comparing(self) -> AbstractContextManager[None]:
        return _one_configuration()

    def compared(self, device: torch.device) -> tuple[torch.dtype, ...]:
        return compared_dtypes()

    def trial(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
        e, _, h = module._parameters[_UP].shape  # type: ignore[union-attr]
        i = module._parameters[_DOWN].shape[-1]  # type: ignore[union-attr]
        small_e, small_h, small_i = 4, 32, 32 if i == h else 16
        up, down = torch.randn(small_e, 2 * small_i, small_h) / 6, torch.randn(small_e, small_h, small_i) / 4
        sizes = {i: small_i, 2 * i: 2 * small_i, h: small_h, e: small_e}
        made = stand_in(module, {_UP: up.to(device), _DOWN: down.to(device)}, {}, sizes)
        x = rows((0.3, 1.0, 4.0, 30.0), small_h, device).detach().flatten(0, 1).requires_grad_()
        index = torch.stack([torch.randperm(small_e)[:2] for _ in range(x.shape[0])]).to(device)
        weights = torch.rand(x.shape[0], 2).to(device).requires_grad_()
        return made, (x, index, weights)

    def binding(self, module: nn.Module, switch: Switch, spec: Any, report: OpReport, dtypes: Dtypes) -> KernelBinding:
        return ExpertsBinding(module, switch, spec, report, dtypes)
