"""The equivalence proof: on the first real batch, the accelerated step has the plain step's loss and gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn as nn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_liger.accelerate import Accelerated
from lightning_liger.hooks import TrainingHooks
from lightning_liger.patching import Switch, bindings_of
from lightning_liger.proof.blame import features, muted, switch_off
from lightning_liger.proof.comparable import why_not_compared
from lightning_liger.proof.comparing import Agreement, Distance, Run, distance, gradients, judge
from lightning_liger.proof.fitting import missing_memory, some_rows
from lightning_liger.proof.ranks import any_rank, everywhere
from lightning_liger.proof.recorded import CannotRepeat
from lightning_liger.proof.report import EquivalenceReport, ProofError
from lightning_liger.proof.requested import clean
from lightning_liger.proof.rounding import Rounding
from lightning_liger.proof.tape import Tape
from lightning_liger.proof.unharmed import reseeding, unharmed
from lightning_liger.proof.units import CaughtLoss, Unit, find_units

# Before anything is blamed, the plain run's own error is asked for again: a router may be undecided between two experts.
_MORE_SAMPLES = 3


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
                with tape:
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
        tape, loss = self._tape, self._loss
        if tape is None:
            return
        self._tape = None
        tape.recording = False
        self._peak = torch.cuda.max_memory_allocated(module.device) if module.device.type == "cuda" else 0
        started = time.perf_counter()
        try:
            with tape.suspended():
                problem = ""
                try:
                    if loss is None:
                        raise CannotRepeat(tape.problem or "training_step returned no loss")
                    tape.cut(loss)
                except CannotRepeat as error:
                    problem = str(error)
                if any_rank(bool(problem), trainer):
                    self._report.skipped = problem or "another rank cannot"
                    return
                self._prove(trainer, module, tape)
                if self._peak and torch.cuda.max_memory_allocated(module.device) > self._peak:
                    # what was made here is no part of the training's peak
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats(module.device)
        finally:
            self.close()
            self._report.seconds = time.perf_counter() - started

    def end_batch(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if self._tape is not None:
            self._report.skipped = "no backward was seen: losses that Lightning does not differentiate are not compared"
            self.close()

    def close(self) -> None:
        for unit in reversed(self._units):
            unit.unbind()
            unit.tape = None
        self._units.clear()
        self._tape = self._loss = None

    # -- and made again ----------------------------------------------------------------------------------------------

    def _prove(self, trainer: Any, module: Any, tape: Tape) -> None:
        handle, report = self._accelerated(), self._report
        agreement, reason, blamed = None, "", []
        too_large = missing_memory(module, handle, module.device, self._allocated)
        try:
            with unharmed([u.module for u in tape.units], handle.bindings(), module.device), handle.report.unnoticed():
                if too_large:
                    report.part = too_large
                    tape, report.part = some_rows(tape, handle)
                runs = _Runs(module, tape, handle, module.device)
                agreement, reason = runs.compare()
                blamed = runs.blamed
        except CannotRepeat as error:
            report.skipped = f"{too_large}, and {error}" if too_large else str(error)
        except torch.OutOfMemoryError:
            report.skipped = "there is no memory for a plain run of the first batch"
        except Exception as error:  # code of the user's, called where they did not expect it
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


class _Runs:
    """The runs of one tape, and what they say."""

    def __init__(self, root: nn.Module, tape: Tape, handle: Accelerated, device: torch.device) -> None:
        self._tape = tape
        self._handle = handle
        self._device = device
        named = [(clean(n), p) for n, p in root.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self._names = [n for n, _ in named]
        self._collected = any(_checkpoints_reentrantly(m) for u in tape.units for m in u.module.modules())
        self.blamed: list[str] = []

    def compare(self) -> tuple[Agreement | None, str]:
        """The agreement and, if there is none to speak of, why."""
        plain = self._run(plain=True)
        if not bool(plain.loss.isfinite()):
            return None, "the plain loss is not finite"
        if not any(g is not None for g in plain.gradients):
            return None, "the loss has no gradients"
        ours = self._run()
        own = self._own_error(plain, 1)
        agreement = judge(plain, ours, own, self._names, self._tape.rows)
        if agreement.agrees:
            return agreement, ""
        other = distance(self._run(plain=True, seed=1), plain)
        if other.loss or any(other.gradients):
            drawn = judge(plain, self._run(plain=True, seed=1), own, self._names, self._tape.rows)
            if not drawn.agrees:
                return None, "the model draws random numbers, and two plain runs differ as well"
        for sample in range(2, 2 + _MORE_SAMPLES):
            own = own.widest(self._own_error(plain, sample))
        agreement = judge(plain, ours, own, self._names, self._tape.rows)
        if not agreement.agrees:
            self.blamed = self._blame(plain, own)
        return agreement, ""

    def _blame(self, plain: Run, own: Distance) -> list[str]:
        """The one feature without which the runs agree; of several that must go together, all."""
        applied = features(self._handle)
        for name in applied:
            with muted(self._handle, [name]):
                if judge(plain, self._run(), own, self._names, self._tape.rows).agrees:
                    return [name]
        gone: list[str] = []
        for name in applied:
            gone.append(name)
            with muted(self._handle, gone):
                if judge(plain, self._run(), own, self._names, self._tape.rows).agrees:
                    return gone
        return applied

    def _own_error(self, plain: Run, sample: int) -> Distance:
        return distance(self._run(plain=True, rounding=sample), plain)

    def _run(self, *, plain: bool = False, seed: int = 0, rounding: int = 0) -> Run:
        with self._handle.paused() if plain else nullcontext(), Rounding(rounding) if rounding else nullcontext():
            loss, leaves = self._tape.again(reseeding(self._device, seed))
        loss = loss.reshape(()) if loss.numel() == 1 else loss.sum()
        found = gradients(loss, [*self._parameters, *leaves], collected=self._collected)
        self._names += [f"input {i}" for i in range(len(self._names), len(found.gradients))]
        return found


def _checkpoints_reentrantly(module: nn.Module) -> bool:
    """Whether transformers' switch for it is on; ``torch.autograd.grad`` cannot go through that."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    return bool(getattr(module, "gradient_checkpointing", False)) and bool(
        getattr(function, "keywords", {}).get("use_reentrant", True)
    )


def _seen(agreement: Agreement) -> str:
    return (
        f"loss {agreement.loss[1]:.6g} instead of {agreement.loss[0]:.6g}, gradients {agreement.gradient_difference:.1e} "
        f"apart where the plain run's own rounding is {agreement.own_gradient:.1e}, furthest at {agreement.worst}"
    )
