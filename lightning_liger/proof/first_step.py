"""The first training step of a sharded model finds out whether its code reads padded positions.

Elsewhere such a read is answered by running the model once more, padded. A model in pieces cannot be run by one rank
alone, and which rank reads what may depend on its batch. So the readers of the first step are given zeros, all ranks
finish the step with as many forwards, and then they compare notes: if nobody has read any, the step counts. Otherwise
the module is put back to what it was, what was read keeps its padding on all ranks from there on, and the step is made
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_liger.accelerate import Accelerated
from lightning_liger.hooks import TrainingHooks
from lightning_liger.padding.padding_free import PaddingFree
from lightning_liger.proof.ranks import everywhere
from lightning_liger.proof.unharmed import as_before


class FirstStep(TrainingHooks):
    """Makes the first ``training_step`` again where a sharded model keeps its padding after all.

    Args:
        accelerated: what was applied, by now.
        wrap: replaces an attribute until the training is over.
    """

    def __init__(self, accelerated: Callable[[], Accelerated], wrap: Callable[[Any, str, Any], None]) -> None:
        self._accelerated = accelerated
        self._wrap = wrap
        self._first = True

    def begin_training(self, trainer: Any, module: Any) -> None:
        if not module.automatic_optimization:
            return  # such a step has stepped its optimizers when it is over
        training_step = trainer.strategy.training_step

        def checked(*args: Any, **kwargs: Any) -> Any:
            reads = self._accelerated().book.reads
            first, self._first = self._first, False
            reads.in_step = True
            try:
                if first and not any(isinstance(a, Iterator) for a in args):
                    return self._rehearsed(training_step, trainer, module, args, kwargs)
                return training_step(*args, **kwargs)
            finally:
                reads.in_step = False

        self._wrap(trainer.strategy, "training_step", checked)

    def _rehearsed(
        self,
        training_step: Callable[..., Any],
        trainer: Any,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        handle = self._accelerated()
        packed = [b for bound in handle.bindings() if isinstance(b := bound.binding(), PaddingFree)]
        if not any(b.is_sharded() for b in packed):
            return training_step(*args, **kwargs)
        # what a step does to its batch it does once, to the Trainer's; the second run has these
        again = apply_to_collection((args, kwargs), Tensor, Tensor.clone)
        logged = dict(trainer._results) if trainer._results is not None else {}
        restore, forget = as_before([module], handle.bindings(), module.device), handle.report.forgetting()
        reads, failed, output = handle.book.reads, None, None
        reads.noted = []
        try:
            output = training_step(*args, **kwargs)
        except Exception as error:
            if not reads.noted:
                raise
            failed = error  # by the zeros, perhaps
        finally:
            noted, reads.noted = reads.noted, None
        mine = [(packed.index(b), what, graph) for b, what, graph in noted if b in packed]
        found = [read for reads_of_one in everywhere(mine, trainer) for read in reads_of_one]
        if not found:
            if failed is not None:
                raise failed
            return output
        del output
        restore()
        forget()
        if trainer._results is not None:
            trainer._results.clear()
            trainer._results.update(logged)
        for index, what, graph in found:
            packed[index].leave_padded(f"{what} reads padded positions of a sharded model", training=graph)
        rank_zero_warn(
            f"lightning-liger: {found[0][1]} reads padded positions, which are not computed without padding, and a "
            f"sharded model cannot be run again on one rank. {type(packed[found[0][0]].module).__name__} keeps its "
            "padding from here on; the first training step was made again."
        )
        return training_step(*again[0], **again[1])
