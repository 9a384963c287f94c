"""The ``forward`` of a language-model head that answers with lazy logits."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.head.lazy import Head, LazyRows
from lightning_liger.patching import Rebound, Switch
from lightning_liger.report import HeadReport


class LazyHead(Rebound):
    """``forward`` of one ``nn.Linear`` whose outputs are vocabulary entries."""

    def __init__(self, module: nn.Module, switch: Switch, report: HeadReport, backend: str) -> None:
        super().__init__(module, switch)
        self.report = report
        self.backend = backend

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 2:
            return self.original(*args, **kwargs)
        hidden = args[0]
        weight, bias = self.module.weight, self.module.bias
        if torch.compiler.is_compiling() or hidden.device != weight.device:
            return self.original(*args, **kwargs)
        if not _whole(weight):
            self.report.refuse("the head's weight is a DTensor where its forward runs (tensor parallel?)")
            return self.original(*args, **kwargs)
        if not isinstance(hidden, LazyRows) and hidden.shape[:-1].numel() == 0:
            return self.original(*args, **kwargs)
        kind = hidden.device.type
        lowered = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(kind) if lowered else hidden.dtype
        if (dtype != weight.dtype and not lowered) or _transforming():
            return self.original(*args, **kwargs)  # a mismatch that PyTorch reports by itself
        backend = resolve_backend(self.backend, hidden.device)
        self.report.name(backend)
        return LazyRows.logits(hidden, Head(weight, bias, dtype, backend, self.report))


def lazy_heads(module: nn.Module) -> list[nn.Module]:
    """The heads inside of ``module`` that answer with lazy logits, and whose weights are read after their forward."""

    def is_lazy(forward: Any) -> bool:
        return isinstance(forward, LazyHead) or (isinstance(forward, Rebound) and is_lazy(forward.previous))

    return [m for m in module.modules() if is_lazy(m.__dict__.get("forward"))]


@functools.cache
def resolve_backend(wanted: str, device: torch.device) -> str:
    """The ``head_backend`` to use for rows on ``device``.

    Raises:
        ValueError: a backend that cannot run there.
    """
    runs_triton = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if wanted == "auto":
        return "triton" if device.type == "cuda" and importlib.util.find_spec("triton") is not None else "torch"
    if wanted in ("triton", "liger"):
        package = "triton" if wanted == "triton" else "liger_kernel"
        if not runs_triton:
            raise ValueError(f"head_backend={wanted!r} needs a CUDA device; the head is on {device}. Use 'auto'.")
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"head_backend={wanted!r} needs the package {package}. Install it or use 'auto'.")
    return wanted


def _transforming() -> bool:
    """Whether a ``torch.func`` transform (grad, vmap, jvp) traces the call."""
    return bool(torch._C._functorch.maybe_current_level() is not None)


def _whole(weight: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return not isinstance(weight, DTensor)
