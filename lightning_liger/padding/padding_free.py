"""A forward that may run without padding, and what was learnt about it on the way."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.patching import Rebound, Switch
from lightning_liger.report import PaddingReport


class PaddingFree(Rebound):
    """``forward`` of a module whose padding is removed where that is right.

    Attributes:
        report: counters and reasons.
        off: why calls with gradients (True) or without (False) keep their padding.
    """

    feature = "padding"

    def __init__(self, module: nn.Module, switch: Switch, report: PaddingReport) -> None:
        super().__init__(module, switch)
        self.report = report
        self.off: dict[bool, str] = {}

    def is_sharded(self) -> bool:
        """Whether a forward is a collective now, or its backward will be, so that ranks must run the same number of them.

        A sharded model may be whole for the length of an evaluation, or from its forward to its backward. In the latter
        each forward still brings along a backward that reduces gradients.
        """
        in_groups = torch.is_grad_enabled() and is_in_groups(self.module)
        return in_groups or any(held_in_pieces(p) for p in self.module.parameters())

    def leave_padded(self, reason: str, *, training: bool) -> None:
        """Run later calls of this kind (with gradients or without) as they are."""
        if training not in self.off:
            self.off[training] = self.why = reason
            self.report.switched_off(type(self.module).__name__, reason, training=training)


def is_in_groups(module: nn.Module) -> bool:
    """Whether FSDP2 gathers parts of the module by themselves, gathered or not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in module.modules() if m is not module)


def held_in_pieces(parameter: Tensor) -> bool:
    """Whether FSDP2, FSDP1 or ZeRO-3 holds the parameter."""
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor) or hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "ds_id")


def written_parameters(module: nn.Module) -> Iterator[Tensor]:
    """What optimizers write to: parameters, or, of what FSDP2 gathers and frees again, the shards inside of ``module``."""
    if not getattr(module, "_is_fsdp_managed_module", False):
        yield from module.parameters()
        return
    from lightning_liger.parallel.groups import parameters_of, sharded_parts

    for part in sharded_parts(module):
        yield from (parameter._sharded_local_tensor for parameter in parameters_of(part))
