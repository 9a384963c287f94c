"""What ran in a step: calls of backbones and uses of heads, written down while somebody wants to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

# Steps that are never read must not pile up.
_MOST = 4096


@dataclass
class BackboneCall:
    """One call with ``shape = (B, S)`` positions.

    Attributes:
        model: the backbone. gradient: gradients were recorded.
        lengths: real tokens of each document; None where the mask is not known on the CPU.
        executed: lengths of the documents that were computed; None where padding stayed, and whole rows were.
    """

    model: Any
    shape: tuple[int, int]
    gradient: bool
    lengths: tuple[int, ...] | None = None
    executed: tuple[int, ...] | None = None


@dataclass
class HeadCall:
    """Logits that were computed: ``computed`` rows of a head with ``outputs`` entries and ``inputs`` hidden units.

    Attributes:
        loss: for a loss that was differentiated, rather than for a reader such as a metric.
        weight_gradient: the weight is trained. gradient: gradients were recorded.
    """

    inputs: int
    outputs: int
    computed: int
    loss: bool
    weight_gradient: bool
    gradient: bool


_Call = TypeVar("_Call")
_Made = TypeVar("_Made", bound="_Calls[Any]")


class _Calls(list[_Call], Generic[_Call]):
    """Calls since the last :meth:`take`; nothing is kept before the first one."""

    wanted = False

    def take(self) -> list[_Call]:
        self.wanted = True
        taken = list(self)
        self.clear()
        return taken

    def copy(self: _Made) -> _Made:
        made = type(self)(self)
        made.wanted = self.wanted
        return made


class BackboneCalls(_Calls[BackboneCall]):
    """Calls of backbones."""

    def seen(self, shape: tuple[int, int], model: Any) -> None:
        if self.wanted and len(self) < _MOST:
            self.append(BackboneCall(model, shape, torch.is_grad_enabled()))

    def real(self, lengths: tuple[int, ...] | None, executed: tuple[int, ...] | None = None) -> None:
        """More about the call that was seen last."""
        if self:
            self[-1].lengths = lengths if lengths is not None else self[-1].lengths
            self[-1].executed = executed


class HeadCalls(_Calls[HeadCall]):
    """Uses of heads."""

    def add(self, head: Any, computed: int, *, loss: bool) -> None:
        """``head`` holds the ``(V, H)`` weight."""
        if self.wanted and head is not None and len(self) < _MOST:
            weight = head.weight
            outputs, inputs = getattr(weight, "ds_shape", weight.shape)[-2:]
            trained, recorded = bool(weight.requires_grad), torch.is_grad_enabled()
            self.append(HeadCall(int(inputs), int(outputs), computed, loss and recorded, trained, recorded))
