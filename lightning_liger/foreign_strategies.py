"""What can be applied under strategies that keep parameters in pieces of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning_liger.data.report import BatchingReport
from lightning_liger.hooks import TrainingHooks
from lightning_liger.settings import Settings
from lightning_liger.trees import is_deepspeed


def fit_to_strategy(strategy: Any, settings: Settings) -> tuple[Settings, list[str]]:
    """The settings that are right under ``strategy``, and a line for each feature that had to go.

    FSDP1 holds the head's weight whole inside its own forward only; a loss that the user computes after it would read
    a flattened tensor.
    """
    kinds = {k.__name__ for k in type(strategy).__mro__}
    reason = None
    if "FSDPStrategy" in kinds:
        reason = "FSDP1 flattens the head's weight; use strategy='liger_fsdp' or DDP"
    if reason is None or not settings.fused_head:
        return settings, []
    return dataclasses.replace(settings, fused_head=False, head=None), [f"Fused LM head + loss: off, because {reason}"]


def check_clipping(trainer: Any, module: Any) -> None:
    """Say before training what FSDP1 says at its first step.

    Raises:
        ValueError: gradients are to be clipped by norm, which Lightning's ``FSDPStrategy`` cannot do.
    """
    if "FSDPStrategy" not in {k.__name__ for k in type(trainer.strategy).__mro__} or not trainer.gradient_clip_val:
        return
    own = type(module).configure_gradient_clipping
    if str(trainer.gradient_clip_algorithm).lower().endswith("value") or _written_by_the_user(own):
        return
    raise ValueError(
        f"gradient_clip_val={trainer.gradient_clip_val} clips by norm, which Lightning's FSDPStrategy (FSDP1) cannot do: "
        "it would raise at the first step. Use strategy='liger_fsdp', or gradient_clip_algorithm='value', or override "
        "configure_gradient_clipping and call self.trainer.model.clip_grad_norm_ there."
    )


def guess_batch_size(strategy: Any, wrap: Callable[[Any, str, Any], None]) -> None:
    """Let DeepSpeed start with loaders that have no batch size: it wants one for its logs, and Lightning asks the loader.

    Args:
        wrap: replaces an attribute of an object until the end of the ``fit``.
    """
    if not is_deepspeed(strategy):
        return
    guess = strategy._auto_select_batch_size

    def known() -> int:
        try:
            size = guess()
        except AttributeError:  # no batch sampler, or one that does not tell
            size = None
        return size if isinstance(size, int) and size > 0 else 1

    wrap(strategy, "_auto_select_batch_size", known)


class DeepSpeedSamples(TrainingHooks):
    """Tells DeepSpeed, whose logs count samples, how many there are in a batch that was filled by tokens."""

    def __init__(self, report: BatchingReport) -> None:
        self._report = report

    def begin_training(self, trainer: Any, module: Any) -> None:
        report = self._report
        if not is_deepspeed(trainer.strategy) or not report.steps:
            return
        engine = trainer.strategy.deepspeed_engine
        each = max(1, round(report.samples / (report.steps * trainer.world_size)))
        engine.set_train_micro_batch_size(each)
        engine.tput_timer.batch_size = engine.train_batch_size()


def _written_by_the_user(method: Any) -> bool:
    return not str(method.__module__).startswith(("lightning.", "pytorch_lightning."))
