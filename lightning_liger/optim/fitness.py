"""Which optimizers can be stepped at once."""

from __future__ import annotations

import importlib.util

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_liger.kernels.device import interpreted

_DTYPES = (torch.float32, torch.bfloat16)


def why_not(optimizer: Optimizer, *, sharded: bool) -> str:
    """Why this package cannot step in place of ``optimizer``, or ``""``.

    Args:
        sharded: parameters may be in pieces whose gradients and state lie as they do.
    """
    if type(optimizer) not in (Adam, AdamW):
        kind = type(optimizer)
        return f"{kind.__module__}.{kind.__name__} computes another step than torch.optim.AdamW's and Adam's"
    for option in ("amsgrad", "capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            return f"{type(optimizer).__name__}({option}=True) keeps or needs more than AdamW's two moments"
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return f"somebody has replaced {type(optimizer).__name__}.step"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters:
        return "it has no parameters"
    dtypes = {p.dtype for p in parameters}
    if not dtypes <= set(_DTYPES):
        other = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes - set(_DTYPES)))
        return f"it updates parameters in {other}; fp32 and bf16 are known"
    if len({p.device for p in parameters}) > 1:
        return "its parameters are on several devices"
    if not sharded and any(isinstance(p, DTensor) for p in parameters):
        return "its parameters were sharded by other code than strategy='liger_fsdp'"
    return ""


def left_open(optimizer: Optimizer) -> bool:
    """Whether its author left the choice of implementation to PyTorch."""
    return all(group.get("foreach") is None and group.get("fused") is None for group in optimizer.param_groups)


def kernel_runs(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of ``device``."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or (device.type == "cpu" and interpreted())
