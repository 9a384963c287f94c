"""Whether a plain run of the first batch fits into memory, and a part of it that does where it would not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from lightning_liger.accelerate import Accelerated
from lightning_liger.device_memory import free_bytes
from lightning_liger.proof.recorded import CannotRepeat, tensors
from lightning_liger.proof.tape import Tape
from lightning_liger.proof.units import Unit

_ROWS_TOKENS = 2048
# Of a logit in a plain loss: in half precision, in fp32, and the gradients of both.
_LOGIT_BYTES = 12


def missing_memory(module: nn.Module, handle: Accelerated, device: torch.device, before: int) -> str:
    """Why a plain run would not fit, or ``""``.

    Args:
        before: bytes allocated before the step that has just been run accelerated.
    """
    if device.type != "cuda":
        return ""
    padding = handle.report.padding
    ratio = padding.positions / padding.tokens if padding.tokens else 1.0
    step = max(torch.cuda.max_memory_allocated(device) - before, 0)
    heads = [m for b in handle.bindings() if b.feature == "head+loss" and (m := b.module()) is not None]
    outputs = max((int(getattr(h, "out_features", 0)) for h in heads), default=0)
    gradients = sum(_local(p).numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    needed = step * ratio + outputs * padding.positions * _LOGIT_BYTES + 2 * gradients
    free = free_bytes(device)
    if needed <= 0.9 * free:
        return ""
    return f"a plain run of it would need about {needed / 1e9:.0f} GB beside what is there, of {free / 1e9:.0f} GB that are free"


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@dataclass(frozen=True)
class Part:
    """One call of a backbone, on some rows of its batch."""

    unit: Unit
    args: Any
    kwargs: Any
    kinds: tuple[str, ...]
    taken: int
    rows: int

    def __str__(self) -> str:
        rows = "" if self.taken == self.rows else f"{self.taken} of {self.rows} rows, "
        return f"{rows}hidden states only"

    def recorded(self) -> Tape:
        """The tape of that call, and of the product of its hidden states with a random gradient. A forward."""
        return _recorded(self.unit, self.args, self.kwargs, self.kinds)


def some_rows(tape: Tape, handle: Accelerated, all_rows: bool = False) -> Part:
    """The first backbone's call with gradients, on a few rows of the batch, or on all.

    Raises:
        CannotRepeat: there is no such call, or its rows cannot be told apart.
    """
    backbones = {b.module() for b in handle.bindings() if b.feature == "padding"}
    calls = [call for call in tape.unit_calls() if call[0].module in backbones and _masks_rows(call[2])]
    if not calls:
        raise CannotRepeat("no backbone was called with a mask, whose rows could be taken instead")
    unit, args, kwargs = calls[0]
    rows, length = kwargs["attention_mask"].shape
    taken = rows if all_rows else max(1, min(rows, _ROWS_TOKENS // length))

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == rows:
            return value[:taken].detach().clone()
        return value

    args, kwargs = tree_map(cut, (args, kwargs))
    return Part(unit, args, kwargs, tape.kinds, taken, rows)


def _masks_rows(kwargs: Any) -> bool:
    mask = kwargs.get("attention_mask")
    return isinstance(mask, Tensor) and mask.dim() == 2


def _recorded(unit: Unit, args: Any, kwargs: Any, kinds: tuple[str, ...]) -> Tape:
    made, before = Tape(kinds), unit.tape
    generator = torch.Generator().manual_seed(0)
    unit.tape = made
    try:
        with made, torch.enable_grad():
            hidden = next(t for t in tensors(unit(*args, **kwargs)) if t.dim() == 3)
            real = hidden[kwargs["attention_mask"] != 0]
            drawn = torch.randn(real.shape, generator=generator).to(real.device, torch.float32)
            loss = (real.float() * drawn).sum()
    finally:
        unit.tape = before
    made.recording = False
    made.cut(loss)
    return made
