"""The equivalence proof: on the first real batch, the accelerated step has the plain step's loss and gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_liger.accelerate import Accelerated
from lightning_liger.hooks import TrainingHooks
from lightning_liger.patching import Switch, bindings_of
from lightning_liger.proof.blame import switch_off
from lightning_liger.proof.comparable import why_not_compared, why_not_the_loss
from lightning_liger.proof.comparing import Agreement
from lightning_liger.proof.fitting import Part, missing_memory, some_rows
from lightning_liger.proof.ranks import any_rank, everywhere
from lightning_liger.proof.recorded import CannotRepeat
from lightning_liger.proof.report import EquivalenceReport, ProofError
from lightning_liger.proof.runs import Runs
from lightning_liger.proof.tape import Tape
from lightning_liger.proof.unharmed import unharmed
from lightning_liger.proof.units import CaughtLoss, Unit, find_units


class EquivalenceProof(TrainingHooks):
    """Compares the first batch's loss and gradients, plain and accelerated.

    While the first ``training_step`` runs, its way from the accelerated modules to its loss is written down. Right after
    its backward, before any optimizer steps, that way is gone again three times without dropout: plain, accelerated, and
    plain with every result rounded at random. The last says how exact the plain run is, which is what is tolerated. None
    of the user's own code runs again but the forwards of those modules.

    Args:
        accelerated: what was applied, by now.
        verify: ``"warn"`` or ``"strict"``.
        wrap: replaces an attribute until the training is over.
    """

    def __init__(
        self, accelerated: Callable[[], Accelerated], verify: str, wrap: Callable[[Any, str, Any], None]
    ) -> None:
        self._accelerated = accelerated
        self._verify = verify
        self._wrap = wrap
        self._tape: Tape | None = None
        self._loss: Tensor | None = None
        self._units: list[Unit] = []
        self._over = False
        self._without_loss = ""
        self._allocated = self._peak = 0

    @property
    def _report(self) -> EquivalenceReport:
        return self._accelerated().report.proof.equivalence

    # -- the step is written down --------------------------------------------------------------------------------

    def begin_training(self, trainer: Any, module: Any) -> None:
        strategy = trainer.strategy
        training_step = strategy.training_step

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._tape is None:
                return training_step(*args, **kwargs)
            tape = self._tape
            caught = CaughtLoss(module, Switch(True), self._catch)
            caught.bind()
            try:
                with nullcontext() if self._without_loss else tape.entered():
                    return training_step(*args, **kwargs)
            finally:
                tape.recording, caught.catch = False, None
                caught.unbind()

        self._wrap(strategy, "training_step", recorded)

    def _catch(self, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else output
        if self._loss is None and isinstance(loss, Tensor):
            self._loss = loss

    def begin_batch(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self._over:
            return
        self._over = True
        handle = self._accelerated()
        reason = why_not_compared(module, handle)
        if any_rank(bool(reason), trainer):
            if not handle.report.nothing_to_accelerate:  # the report says that already
                self._report.skipped = reason or "another rank cannot"
            return
        if module.device.type == "cuda":
            self._allocated = torch.cuda.memory_allocated(module.device)
        self._tape = Tape(tuple({"cpu", module.device.type}))
        units = find_units(module, handle.bindings())
        self._without_loss = why_not_the_loss(module, units)
        if any(isinstance(b, Unit) for found in units for b in bindings_of(found)):
            self._tape = None  # another LigerCallback of this Trainer compares it
            return
        for found, path in units.items():
            unit = Unit(found, Switch(True), path, self._tape)
            unit.bind()
            self._units.append(unit)

    def before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        if self._tape is not None and self._loss is None and self._tape.recording:
            self._loss = loss  # manual optimization: the step returns nothing

    def after_backward(self, trainer: Any, module: Any) -> None:
        if self._tape is None:
            return
        self._tape.recording = False
        problem = self._without_loss
        if not problem:
            try:
                with self._tape.suspended():
                    if self._loss is None:
                        raise CannotRepeat(self._tape.problem or "training_step returned no loss")
                    self._tape.cut(self._loss)
            except CannotRepeat as error:
                problem = str(error)
        self._finish(trainer, module, problem)

    def end_batch(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if self._tape is not None:
            self._finish(trainer, module, "Lightning did not differentiate the loss")

    def _finish(self, trainer: Any, module: Any, without_loss: str) -> None:
        tape, self._tape = self._tape, None
        assert tape is not None
        self._peak = torch.cuda.max_memory_allocated(module.device) if module.device.type == "cuda" else 0
        started = time.perf_counter()
        try:
            with tape.suspended():
                self._prove(trainer, module, tape, without_loss)
                if self._peak and torch.cuda.max_memory_allocated(module.device) > self._peak:
                    # what was made here is no part of the training's peak
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats(module.device)
        finally:
            tape.forget()
            self.close()
            self._report.seconds = time.perf_counter() - started

    def close(self) -> None:
        for unit in reversed(self._units):
            unit.unbind()
            unit.tape = None
        self._units.clear()
        self._tape = self._loss = None

    # -- and made again ----------------------------------------------------------------------------------------------

    def _prove(self, trainer: Any, module: Any, tape: Tape, without_loss: str) -> None:
        handle, report = self._accelerated(), self._report
        too_large = missing_memory(module, handle, module.device, self._allocated)
        reasons = everywhere(without_loss or too_large, trainer)
        report.without_loss = reasons[0] or next((f"on another rank: {r}" for r in reasons if r), "")
        part: Part | None = None
        try:
            if report.without_loss:
                part = some_rows(tape, handle, all_rows=not any(everywhere(bool(too_large), trainer)))
                report.part = str(part)
            else:
                tape.check()
        except CannotRepeat as error:
            report.skipped = f"{report.without_loss}, and {error}" if report.without_loss else str(error)
        if any_rank(bool(report.skipped), trainer):
            report.skipped = report.skipped or "another rank cannot"
            return
        agreement, reason, blamed = None, "", []
        runs = Runs(module, handle, trainer, tape.units if part is None else [part.unit])
        try:
            with unharmed(runs.modules, handle.bindings(), module.device), handle.report.unnoticed():
                agreement, reason = runs.compare(tape if part is None else part.recorded)
                blamed = runs.blamed
        except CannotRepeat as error:
            report.skipped = str(error)
        except Exception as error:  # code of the user's, called where they did not expect it
            if runs.in_lock_step:
                raise  # the other ranks are waiting for this one
            report.skipped = "there is no memory for a plain run of the first batch"
            if not isinstance(error, torch.OutOfMemoryError):
                report.skipped = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        report.agreement = agreement
        if reason and not blamed:
            report.skipped = reason
        blamed = list(dict.fromkeys(name for names in everywhere(blamed, trainer) for name in names))
        if not blamed:
            return
        assert agreement is not None or not reason
        seen = "on another rank" if agreement is None or agreement.agrees else _seen(agreement)
        report.mismatch = f"{' and '.join(blamed)} computes something else than the plain code: {seen}"
        if self._verify == "strict":
            raise ProofError(
                f"lightning-liger: {report.mismatch}. Switch it off (kernels={{'<op>': False}}, fused_head=False, "
                "padding_free=False), or go on without it with verify='warn'."
            )
        switch_off(handle, blamed, report.mismatch)
        report.switched_off = blamed
        rank_zero_warn(
            f"lightning-liger: {report.mismatch}. It is switched off from here on; this first batch's gradients were "
            "still computed with it."
        )


def _seen(agreement: Agreement) -> str:
    return (
        f"loss {agreement.loss[1]:.6g} instead of {agreement.loss[0]:.6g}, gradients {agreement.gradient_difference:.1e} "
        f"apart where the plain run's own rounding is {agreement.own_gradient:.1e}, furthest at {agreement.worst}"
    )
