"""A callback that trains only while it is told to, and reports each turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_liger.bench.staying import stay
from lightning_liger.bench.turns import Turns
from lightning_liger.bench.work import Work
from lightning_liger.trees import callback_bases

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
else:
    _Base = type("_Base", callback_bases(), {})


class Baton(_Base):
    """Lightning's hooks to :class:`Turns`."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        stay(trainer, pl_module)
        self._turns.set_up(trainer.strategy.root_device)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps_before = trainer.global_step
        self._turns.start(Work(pl_module), str(trainer.precision))
        self._end(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._turns.saw(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._turns.lost(_loss(outputs))
        if self._turns.stopped or trainer.global_step == self._steps_before:
            return
        self._steps_before = trainer.global_step
        self._turns.step()
        self._end(trainer)

    def _end(self, trainer: Any) -> None:
        if self._turns.stopped:
            trainer.should_stop = True


def _loss(outputs: Any) -> Tensor | None:
    found = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return found if isinstance(found, Tensor) else None
