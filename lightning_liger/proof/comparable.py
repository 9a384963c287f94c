"""Which trainings have a first step that can be compared, and which of them as a whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn as nn

from lightning_liger.accelerate import Accelerated
from lightning_liger.patching import calls_compiled, inside_compiled


def why_not_compared(module: nn.Module, handle: Accelerated) -> str:
    """Why the first step is not compared, or ``""``."""
    from torch.distributed.tensor import DTensor

    if handle.report.nothing_to_accelerate:
        return "nothing was accelerated"
    if not handle.is_active:
        return "acceleration is switched off"
    if handle.sequence is not None:
        return "the tokens of a batch are divided among ranks"
    for parameter in module.parameters():
        if hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "ds_id"):
            return "the model is sharded by something else than FSDP2"
        if parameter._backward_hooks:
            return "hooks on parameters would be called once more"
        if isinstance(parameter, DTensor) and getattr(parameter, "_post_accumulate_grad_hooks", None):
            return "hooks on the gradients of shards would be called once more"
    if any(hasattr(m, "_checkpoint_wrapped_module") for m in module.modules()) and any(
        getattr(getattr(m, "config", None), "use_cache", False) is True for m in module.modules()
    ):
        return "the plain blocks write to a KV cache, twice where they are recomputed (set use_cache=False)"
    return ""


def why_not_the_loss(module: nn.Module, units: Iterable[nn.Module]) -> str:
    """Why the way from the accelerated modules to the loss is not written down, or ``""``."""
    if calls_compiled(module) or not inside_compiled(module) <= {m for unit in units for m in unit.modules()}:
        return "compiled code outside of the accelerated modules has a part in the step"
    return ""
