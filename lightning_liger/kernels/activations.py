"""Squared ReLU, where it is a module of its own (Nemotron)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.kernels.device import stands_aside
from lightning_liger.kernels.functions import relu_squared
from lightning_liger.kernels.registry import Dtypes, KernelBinding, KernelPatch
from lightning_liger.kernels.report import OpReport
from lightning_liger.kernels.standin import rows, stand_in
from lightning_liger.patching import Switch

_LARGEST = 65536  # one program of the kernel handles one row


class ReLUSquaredBinding(KernelBinding):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return self.aside("not called with one tensor", *args, **kwargs)
        (x,) = args
        if reason := stands_aside(x):
            return self.aside(reason, x)
        if x.shape[-1] > _LARGEST:
            return self.aside(f"rows of {x.shape[-1]} are too long for one program", x)
        self.ran()
        return relu_squared(x)


class ReLUSquaredPatch(KernelPatch):
    op = "relu_squared"
    title = "ReLU²"
    kernels = ("_relu_squared_forward_kernel", "_relu_squared_backward_kernel")

    def match(self, module: nn.Module) -> bool:
        name = type(module).__name__.lower()
        if "relu" not in name or not ("squared" in name or "relu2" in name):
            return False
        return next(itertools.chain(module.parameters(), module.buffers(), module.children()), None) is None

    def candidates(self, module: nn.Module) -> list[str]:
        return ["relu_squared"]

    def trial(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return stand_in(module, {}, {}), (rows((0.1, 1.0, 30.0), 16, device),)

    def binding(self, module: nn.Module, switch: Switch, spec: Any, report: OpReport, dtypes: Dtypes) -> KernelBinding:
        return ReLUSquaredBinding(module, switch, spec, report, dtypes)
