"""What can be applied under strategies that keep parameters in pieces of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_liger.settings import Settings


def fit_to_strategy(strategy: Any, settings: Settings) -> tuple[Settings, list[str]]:
    """The settings that are right under ``strategy``, and a line for each feature that had to go.

    FSDP1 and ZeRO-3 hold the head's weight whole inside their own forward only; a loss that the user computes after
    it would read an empty or flattened tensor.
    """
    kinds = {k.__name__ for k in type(strategy).__mro__}
    reason = None
    if "FSDPStrategy" in kinds:
        reason = "FSDP1 flattens the head's weight; use FSDP2 (ModelParallelStrategy) or DDP"
    elif "DeepSpeedStrategy" in kinds and getattr(strategy, "zero_stage_3", False):
        reason = "ZeRO stage 3 gives the head's weight back before the loss reads it; use stage 2, FSDP2 or DDP"
    if reason is None or not settings.fused_head:
        return settings, []
    return dataclasses.replace(settings, fused_head=False, head=None), [f"Fused LM head + loss: off, because {reason}"]
