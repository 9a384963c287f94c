"""Token-budget batches on a strategy's hooks, for one ``fit``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning_liger.data.batching import TokenBatches
from lightning_liger.data.cost import cost_of
from lightning_liger.data.out_of_memory import explained
from lightning_liger.data.report import BatchingReport
from lightning_liger.settings import Settings


def batch_by_tokens(
    trainer: Any, module: Any, settings: Settings, wrap: Callable[[Any, str, Any], None]
) -> TokenBatches | None:
    """Rebuild the loaders that ``trainer`` is going to ask for; None if ``settings`` leave them alone.

    Args:
        wrap: replaces an attribute of an object until the end of the ``fit``.
    """
    if settings.max_tokens_per_batch is None:
        return None
    batches = TokenBatches(
        settings.max_tokens_per_batch,
        settings.length_fn,
        settings.overlong,
        functools.partial(cost_of, module),
        BatchingReport(),
    )
    strategy = trainer.strategy
    process_dataloader = strategy.process_dataloader

    def process(loader: Any) -> Any:
        loader = process_dataloader(loader)
        return batches.rebuild(loader, trainer) if trainer.training else loader

    wrap(strategy, "process_dataloader", process)
    for name in ("training_step", "backward", "optimizer_step"):
        wrap(strategy, name, explained(getattr(strategy, name), batches.describe_batch))
    return batches
