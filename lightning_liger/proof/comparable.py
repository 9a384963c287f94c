"""Which trainings have a first step that can be compared."""

from __future__ import annotations

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
    if inside_compiled(module) or calls_compiled(module):
        return "compiled code would be compiled again for the plain run's shapes"
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) or hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "ds_id"):
            return "the model is sharded"
        if parameter._backward_hooks:
            return "hooks on parameters would be called once more"
    return ""
