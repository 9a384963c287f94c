"""How the gradients of one more run are taken, so that nothing is left of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_liger.parallel.groups import sharded_parts
from lightning_liger.parallel.repeating import Repeating, copies_of
from lightning_liger.proof.comparing import Run
from lightning_liger.proof.ranks import AllRanks, everywhere
from lightning_liger.proof.recorded import CannotRepeat


class Differentiating(ABC):
    """Gradients of losses with respect to ``parameters``, and the other leaves of each run.

    Attributes:
        in_lock_step: all ranks make the same runs, and have the same figures.
    """

    in_lock_step = False

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters

    @contextmanager
    def around(self) -> Iterator[None]:
        """All runs."""
        yield

    def before_forward(self) -> None:
        """Of each run; nothing has to be done for what this rank holds whole."""
        return

    @abstractmethod
    def of(self, loss: Tensor, leaves: Sequence[Tensor]) -> Run:
        """Gradients of ``loss``: of the parameters, then of ``leaves``."""

    def most(self, number: int) -> int:
        """The largest of all ranks that compare the same gradients."""
        return number


class ByGrad(Differentiating):
    """By ``torch.autograd.grad``: no ``.grad`` is touched, and no hook on accumulation is called."""

    def of(self, loss: Tensor, leaves: Sequence[Tensor]) -> Run:
        targets = [*self._parameters, *leaves]
        if not loss.requires_grad:
            return Run(loss.detach(), [None] * len(targets))
        found = torch.autograd.grad(loss, targets, allow_unused=True)
        return Run(loss.detach(), [None if g is None else g.detach() for g in found])


class ByBackward(Differentiating):
    """By ``backward()``, as reentrant checkpointing needs it; every ``.grad`` is afterwards what it was."""

    def of(self, loss: Tensor, leaves: Sequence[Tensor]) -> Run:
        targets = [*self._parameters, *leaves]
        if not loss.requires_grad:
            return Run(loss.detach(), [None] * len(targets))
        with _without_grad(targets):
            loss.backward()
            return Run(loss.detach(), [None if t.grad is None else t.grad.detach() for t in targets])


class OfShards(Differentiating):
    """As FSDP2 takes them: each rank holds its piece of what was reduced, and all decide by the same figures.

    Args:
        modules: whose forwards are called past their hooks.
    """

    def __init__(
        self,
        root: nn.Module,
        parameters: Sequence[Tensor],
        modules: Sequence[nn.Module],
        trainer: Any,
        device: torch.device,
    ) -> None:
        self._repeating = Repeating(root, modules)
        super().__init__(self._repeating.shards(parameters))
        self._trainer = trainer
        self.in_lock_step = trainer.world_size > 1
        self._copies = [copies_of(p) for p in self._parameters]
        self._kinds = {(dtype, device) for dtype in self._repeating.dtypes()}

    @contextmanager
    def around(self) -> Iterator[None]:
        with self._repeating.beside_training(), _without_grad(self._parameters):
            yield

    def before_forward(self) -> None:
        self._repeating.gather()

    def most(self, number: int) -> int:
        return max(everywhere(number, self._trainer))

    def of(self, loss: Tensor, leaves: Sequence[Tensor]) -> Run:
        if not all(everywhere(loss.requires_grad, self._trainer)):
            raise CannotRepeat("the loss of a rank has no gradients")
        targets = [*self._parameters, *leaves]
        self._repeating.backward(loss)
        found = [None if t.grad is None else _local(t.grad) for t in targets]
        for target in targets:
            target.grad = None
        copies = [*self._copies, *(1 for _ in leaves)]
        return Run(loss.detach(), found, AllRanks(self._trainer, copies), self._kinds)


def differentiating(
    root: nn.Module, parameters: Sequence[Tensor], modules: Sequence[nn.Module], trainer: Any, device: torch.device
) -> Differentiating:
    """The way that fits ``root``, of which ``modules`` are run again."""
    if any(True for _ in sharded_parts(root)):
        return OfShards(root, parameters, modules, trainer, device)
    collected = any(_checkpoints_reentrantly(m) for module in modules for m in module.modules())
    return ByBackward(parameters) if collected else ByGrad(parameters)


def _checkpoints_reentrantly(module: nn.Module) -> bool:
    """Whether transformers' switch for it is on; ``torch.autograd.grad`` cannot go through that."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    return bool(getattr(module, "gradient_checkpointing", False)) and bool(
        getattr(function, "keywords", {}).get("use_reentrant", True)
    )


@contextmanager
def _without_grad(targets: Sequence[Tensor]) -> Iterator[None]:
    before = [t.grad for t in targets]
    try:
        for t in targets:
            t.grad = None
        yield
    finally:
        for t, grad in zip(targets, before, strict=True):
            t.grad = grad


def _local(gradient: Tensor) -> Tensor:
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach()
