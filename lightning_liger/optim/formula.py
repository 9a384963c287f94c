"""The step of Adam and AdamW in PyTorch's own operators, for one tensor; what kernels are compared with.

Kingma and Ba, "Adam" (2015), algorithm 1; Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019). Operations
and their order are those of ``torch.optim.adamw`` with ``foreach=False``: with state in the parameters' dtype the result
is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_liger.optim.places import alike
from lightning_liger.optim.rounding import key_at, noise, to_bf16

# Entries at a time where values are converted, so that what is fp32 for a moment stays small.
_SLICE = 2**22


@dataclass(frozen=True)
class Row:
    """The numbers of one parameter group at one step."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    step: int

    @property
    def correction1(self) -> float:
        return float(1 - self.beta1**self.step)

    @property
    def correction2_root(self) -> float:
        return float((1 - self.beta2**self.step) ** 0.5)


def row_of(group: Mapping[str, Any], step: int) -> Row:
    """What a parameter group of ``torch.optim.Adam`` or ``AdamW`` says about a step."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        lr = float(lr)
    beta1, beta2 = group["betas"]
    return Row(
        lr=lr,
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=bool(group["maximize"]),
        step=step,
    )


def update(p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, row: Row, key: int) -> None:
    """One step of one tensor, in place.

    Args:
        p: any shape; fp32 or bf16. gradient: the same shape.
        exp_avg, exp_avg_sq: fp32 where p is; or bf16, which is rounded stochastically.
        row: at this step, counted from 1.
        key: of this parameter's noise.
    """
    if exp_avg.dtype == torch.float32:
        _step(p, gradient, exp_avg, exp_avg_sq, row)
        return
    whole = alike((p, exp_avg, exp_avg_sq))
    if whole and not alike((p, gradient)):
        gradient = torch.empty_like(p, dtype=gradient.dtype).copy_(gradient)
    size = _SLICE if whole else max(p.numel(), 1)
    flat = [t.as_strided((t.numel(),), (1,)) if whole else t for t in (p, gradient, exp_avg, exp_avg_sq)]
    for start in range(0, p.numel(), size):
        own = [t[start : start + size] for t in flat] if whole else flat
        weights, g, m, v = (t.float() for t in own)
        _step(weights, g, m, v, row)
        if own[0].dtype != torch.float32:
            own[0].copy_(weights)
        bits = noise(key_at(key, row.step), start, m.numel(), m.device).view(m.shape)
        own[2].copy_(to_bf16(m, bits & 0xFFFF))
        own[3].copy_(to_bf16(v, bits >> 16))


def _step(p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, row: Row) -> None:
    if row.maximize:
        gradient = -gradient
    if row.weight_decay:
        if row.decoupled:
            p.mul_(1 - row.lr * row.weight_decay)
        else:
            gradient = gradient.add(p, alpha=row.weight_decay)
    exp_avg.lerp_(gradient, 1 - row.beta1)
    exp_avg_sq.mul_(row.beta2).addcmul_(gradient, gradient, value=1 - row.beta2)
    denominator = (exp_avg_sq.sqrt() / row.correction2_root).add_(row.eps)
    if isinstance(row.lr, Tensor):
        p.sub_(row.lr / row.correction1 * (exp_avg / denominator))
    else:
        p.addcdiv_(exp_avg, denominator, value=-(row.lr / row.correction1))
