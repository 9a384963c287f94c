"""The runs of one way to a loss, plain and accelerated, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from lightning_liger.accelerate import Accelerated
from lightning_liger.patching import inside_compiled
from lightning_liger.proof.blame import features, muted
from lightning_liger.proof.comparing import Agreement, Distance, Run, distance, judge
from lightning_liger.proof.differentiating import differentiating
from lightning_liger.proof.requested import clean
from lightning_liger.proof.rounding import Rounding
from lightning_liger.proof.tape import Tape
from lightning_liger.proof.unharmed import reseeding
from lightning_liger.proof.units import Unit

# Before anything is blamed, the plain run's own error is asked for again: a router may be undecided between two experts.
_MORE_SAMPLES = 3


class Runs:
    """Runs of the way from ``units`` to a loss.

    Attributes:
        blamed: features without which the runs agree; empty where they do with them.
    """

    def __init__(self, root: Any, handle: Accelerated, trainer: Any, units: list[Unit]) -> None:
        self._handle = handle
        self._device: torch.device = root.device
        named = [(clean(n), p) for n, p in root.named_parameters() if p.requires_grad]
        self._names = [n for n, _ in named]
        self.modules = [unit.module for unit in units]
        self._differentiating = differentiating(root, [p for _, p in named], self.modules, trainer, self._device)
        self._compiled = any(inside_compiled(m) for m in self.modules)
        self.blamed: list[str] = []

    @property
    def in_lock_step(self) -> bool:
        """Whether other ranks make the same runs, and wait for this one."""
        return self._differentiating.in_lock_step

    def compare(self, tape: Tape | Callable[[], Tape]) -> tuple[Agreement | None, str]:
        """The agreement and, if there is none to speak of, why. Ranks that run in lock step all have the same answer.

        Args:
            tape: what is run; or a forward that writes it down.
        """
        with self._differentiating.around():
            if isinstance(tape, Tape):
                self._tape = tape
            else:
                self._differentiating.before_forward()
                with self._uncompiled():
                    self._tape = tape()
            self._rows = self._differentiating.most(self._tape.rows)
            return self._compare()

    def _compare(self) -> tuple[Agreement | None, str]:
        plain = self._run(plain=True)
        if not plain.is_finite:
            return None, "the plain loss is not finite"
        if not plain.has_gradients:
            return None, "the loss has no gradients"
        ours = self._run()
        own = self._own_error(plain, 1)
        agreement = judge(plain, ours, own, self._names, self._rows)
        if agreement.agrees:
            return agreement, ""
        other = distance(self._run(plain=True, seed=1), plain)
        if other.loss or any(other.gradients):
            drawn = judge(plain, self._run(plain=True, seed=1), own, self._names, self._rows)
            if not drawn.agrees:
                return None, "the model draws random numbers, and two plain runs differ as well"
        for sample in range(2, 2 + _MORE_SAMPLES):
            own = own.widest(self._own_error(plain, sample))
        agreement = judge(plain, ours, own, self._names, self._rows)
        if not agreement.agrees:
            self.blamed = self._blame(plain, own)
        return agreement, ""

    def _blame(self, plain: Run, own: Distance) -> list[str]:
        """The one feature without which the runs agree; of several that must go together, all."""
        applied = features(self._handle)
        for name in applied:
            with muted(self._handle, [name]):
                if judge(plain, self._run(), own, self._names, self._rows).agrees:
                    return [name]
        gone: list[str] = []
        for name in applied:
            gone.append(name)
            with muted(self._handle, gone):
                if judge(plain, self._run(), own, self._names, self._rows).agrees:
                    return gone
        return applied

    def _own_error(self, plain: Run, sample: int) -> Distance:
        return distance(self._run(plain=True, rounding=sample), plain)

    def _run(self, *, plain: bool = False, seed: int = 0, rounding: int = 0) -> Run:
        with ExitStack() as stack:
            if plain:
                stack.enter_context(self._handle.paused())
            stack.enter_context(self._uncompiled())
            self._differentiating.before_forward()
            with Rounding(rounding) if rounding else nullcontext():
                loss, leaves = self._tape.again(reseeding(self._device, seed))
            loss = loss.reshape(()) if loss.numel() == 1 else loss.sum()
            found = self._differentiating.of(loss, leaves)
        self._names += [f"input {i}" for i in range(len(self._names), len(found.gradients))]
        return found

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """Layers that the user compiled: nothing is compiled for the plain run's shapes, nor for what is without dropout."""
        return torch.compiler.set_stance("force_eager") if self._compiled else nullcontext()
