"""A training whose model nobody wants afterwards."""

from __future__ import annotations

from typing import Any


def stay(trainer: Any, module: Any) -> None:
    """Keep Lightning from carrying weights, gradients and optimizer state to the host when training ends.

    With billions of parameters that takes longer than what is measured.
    """
    teardown = trainer.strategy.teardown

    def without_moving() -> None:
        trainer.strategy.optimizers = []
        module.cpu = lambda: module
        teardown()

    trainer.strategy.teardown = without_moving
