"""Callbacks that keep a second copy of the weights: cut as the module is, or refused."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_liger.parallel.pieces import shard_like
from lightning_liger.parallel.shard import reshard


def refuse_what_cannot_work(callbacks: Iterable[Any]) -> None:
    """Raise before training for callbacks that cannot keep their promise on a sharded module.

    Raises:
        ValueError: naming the callback and what to use instead.
    """
    for callback in callbacks:
        if _is_a(callback, "StochasticWeightAveraging"):
            raise ValueError(
                "StochasticWeightAveraging replaces the LR schedulers while a checkpoint is being restored, which a"
                " sharded module does after its setup: a resumed run would train on with the wrong learning rate. Use"
                " lightning.pytorch.callbacks.WeightAveraging (equal weights by default), which works with this strategy."
            )


def shard_averages(callbacks: Iterable[Any], module: nn.Module) -> None:
    """Let ``WeightAveraging`` and ``EMAWeightAveraging`` average each rank's piece: their copy was made whole."""
    for callback in callbacks:
        average = getattr(callback, "_average_model", None)
        if average is None or not _is_a(callback, "WeightAveraging"):
            continue
        shard_like(average.module, module)
        # what validation or a hook gathered is no copy of the weights that are swapped
        for owner, name in (
            (callback, "_swap_models"),
            (callback, "_copy_average_to_current"),
            (average, "update_parameters"),
        ):
            if name not in owner.__dict__:
                setattr(owner, name, functools.partial(_on_shards, getattr(owner, name)))


def _on_shards(act: Any, module: nn.Module) -> Any:
    reshard(module)
    return act(module)


def _is_a(callback: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(callback).__mro__)
