"""What follows a training: a Trainer's hooks in the order they are called."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class TrainingHooks:
    """Base of whatever follows a training. Every hook does nothing here; a class overrides those that it needs.

    One object lives from the start of a training to its end, and hooks are called on every rank.
    """

    def begin_training(self, trainer: Any, module: Any) -> None:
        """After the strategy's setup and the sanity check, before the first batch."""

    def begin_epoch(self, trainer: Any, module: Any) -> None:
        """Before the loop asks for the epoch's iterator."""

    def begin_batch(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        """Before ``training_step``; ``batch`` is on the device."""

    def before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        """Also called for each ``manual_backward``."""

    def after_backward(self, trainer: Any, module: Any) -> None:
        """Gradients are there, not yet clipped."""

    def before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Before clipping under automatic optimization; skipped for batches that only accumulate."""

    def end_batch(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        """``module.log`` can be called here."""

    def begin_validation(self, trainer: Any, module: Any) -> None:
        """A validation inside of the training begins."""

    def end_validation(self, trainer: Any, module: Any) -> None:
        """A validation inside of the training is over."""

    def end_training(self, trainer: Any, module: Any) -> None:
        """After the last batch, while loggers and process groups are still there; not called when training raised."""

    def close(self) -> None:
        """The run is over, by an exception too: let go of what is held."""
