"""The ``forward`` of a language-model head that answers with lazy logits."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from lightning_liger.head.gathering import Gathering, Hold, gathering_of
from lightning_liger.head.lazy import Head, LazyRows
from lightning_liger.head.partitioned import Partitioned, is_partitioned, partitioned
from lightning_liger.head.pending import NEWCOMERS
from lightning_liger.head.readings import Habits
from lightning_liger.patching import Rebound, Switch
from lightning_liger.report import HeadReport


class LazyHead(Rebound):
    """``forward`` of one ``nn.Linear`` whose outputs are vocabulary entries."""

    feature = "head+loss"

    def __init__(self, module: nn.Module, switch: Switch, report: HeadReport, backend: str) -> None:
        super().__init__(module, switch)
        self.report = report
        self.backend = backend
        self.habits = Habits()
        self._gathering: Gathering | Partitioned | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 2:
            return self.original(*args, **kwargs)
        hidden = args[0]
        weight, bias = self.projection()
        if torch.compiler.is_compiling() or hidden.device != weight.device:
            return self.original(*args, **kwargs)
        self.look_for_shards()
        in_pieces = _in_pieces(self.module, self._gathering)
        if in_pieces is not None:
            self.why = in_pieces
            self.report.refuse(in_pieces)
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
        self.runs += 1
        hold = self._hold(weight)
        return LazyRows.logits(hidden, Head(weight, bias, dtype, backend, self.report, hold, habits=self.habits))

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """What the hidden rows are multiplied with, and what is added."""
        return self.module.weight, self.module.bias

    # -- sharded by FSDP2 --------------------------------------------------------------------------------------------

    def bind(self) -> None:
        super().bind()
        NEWCOMERS.add(self)
        self.look_for_shards()

    def unbind(self) -> None:
        NEWCOMERS.discard(self)
        if self._gathering is not None:
            self._gathering.detach()
            self._gathering = None
        super().unbind()

    def look_for_shards(self) -> None:
        if self._gathering is None:
            self._gathering = gathering_of(self.module) or partitioned(self.module)
            if self._gathering is not None:
                self._gathering.attach()

    def _hold(self, weight: Tensor) -> Hold | None:
        NEWCOMERS.discard(self)
        return Hold(self._gathering) if self._gathering is not None and self._gathering.gathered(weight) else None


class LazyTokenHead(LazyHead):
    """PEFT's ``TrainableTokensLayer`` around a head: some rows of its weight are trained, the others are the base's."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.module
        if layer.disable_adapters or layer.merged or not layer.active_adapters:
            return self.original(*args, **kwargs)  # which calls the base
        return super().call(*args, **kwargs)

    def projection(self) -> tuple[Tensor, Tensor | None]:
        return self.module.get_merged_weights(self.module.active_adapters), None


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


def _in_pieces(module: Any, gathering: Any) -> str | None:
    """Why the weight cannot be read again after the head's own forward; None if it can."""
    from torch.distributed.tensor import DTensor

    if isinstance(module.weight, DTensor):
        return "the head's weight is a DTensor where its forward runs (tensor parallel?)"
    if dist.is_available() and dist.is_initialized() and not isinstance(module.weight, nn.Parameter):
        # a view of the flat parameter, which is gone after the forward
        return "FSDP1 flattens the head's weight; use FSDP2 (ModelParallelStrategy) or DDP"
    if is_partitioned(module) and gathering is None:
        return "ZeRO stage 3 fetches the head's weight with a module around it (a leaf module?), not with the head"
    return None
