"""Ways in which acceleration is undone, or made wrong, behind our back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_liger.trees import callback_bases


class Sabotage(*callback_bases()):  # type: ignore[misc]
    """Does something to the module once it is accelerated, before the first batch."""

    def __init__(self, act: Callable[[Any], None]) -> None:
        super().__init__()
        self.act = act

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.act(pl_module)


def restore_forward(path: str) -> Callable[[Any], None]:
    """Take what is bound on one module away."""

    def act(module: Any) -> None:
        del vars(module.get_submodule(path))["forward"]

    return act
