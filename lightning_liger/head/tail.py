"""What happens to logits between the head's product and whoever reads them: scaling, soft-caps, normalisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Step: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TailOp:
    """One step on logits whose vocabulary is the last dim.

    Attributes:
        kind: ``"scale"`` (by ``factor``), ``"tanh"``, ``"log_softmax"``, ``"softmax"``, or ``"call"`` (any other
            element-wise ``step``).
    """

    kind: str
    factor: float = 1.0
    step: Step | None = None


NORMALISERS = ("log_softmax", "softmax")


def apply_tail(logits: Tensor, tail: tuple[TailOp, ...]) -> Tensor:
    """``logits`` ``(..., V)`` after every step of ``tail``, in their dtype."""
    for op in tail:
        if op.kind == "scale":
            logits = logits * op.factor
        elif op.kind == "tanh":
            logits = logits.tanh()
        elif op.kind == "log_softmax":
            logits = torch.log_softmax(logits, -1)
        elif op.kind == "softmax":
            logits = torch.softmax(logits, -1)
        else:
            assert op.step is not None
            logits = op.step(logits)
    return logits


def tail_with_slopes(logits: Tensor, tail: tuple[TailOp, ...]) -> tuple[Tensor, list[Tensor | float]]:
    """``logits`` after a tail of scales and tanhs, and the derivative of each step."""
    slopes: list[Tensor | float] = []
    for op in tail:
        if op.kind == "scale":
            logits = logits * op.factor
            slopes.append(op.factor)
        else:
            logits = logits.tanh()
            slopes.append(1 - logits * logits)
    return logits, slopes


def is_elementwise(tail: tuple[TailOp, ...]) -> bool:
    """Whether each entry depends on itself alone, so that part of the vocabulary can be computed by itself."""
    return all(op.kind not in NORMALISERS for op in tail)


def has_known_slope(tail: tuple[TailOp, ...]) -> bool:
    """Whether the one-pass cross entropy can differentiate the tail by itself."""
    return all(op.kind in ("scale", "tanh") for op in tail)
