"""Which optimizers of a training are stepped at once, and with which state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_liger.choices import Auto, OptimizerStateDtype
from lightning_liger.optim.adamw import FusedStep, fused_step_of
from lightning_liger.optim.fitness import kernel_runs, left_open, why_not
from lightning_liger.optim.places import local
from lightning_liger.optim.report import OptimizerReport
from lightning_liger.optim.trial import kernel_fails

_DTYPES = {None: None, "bf16": torch.bfloat16}
# Strategies whose optimizers update the module's own parameters, with gradients that are whole.
_PLAIN_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_OTHERS = (
    "Use torch.optim.AdamW or Adam without these flags, or leave optimizer_state_dtype out: the state is then as the "
    "optimizer makes it."
)


def take_over(
    optimizers: Sequence[Optimizer],
    state_dtype: OptimizerStateDtype | None,
    fused: bool | Auto,
    report: OptimizerReport,
    *,
    sharded: bool,
) -> None:
    """Step in place of the optimizers that are Adam or AdamW, as far as that is asked for.

    Args:
        optimizers: of one training, before any step. state_dtype, fused: the options of these names.
        sharded: they are of ``liger_fsdp``.

    Raises:
        ValueError: ``state_dtype`` is given, and an optimizer is another one.
    """
    report.found, report.applied, report.bytes = len(optimizers), 0, 0
    for optimizer in optimizers:
        reason = why_not(optimizer, sharded=sharded)
        if state_dtype is not None:
            if reason:
                raise ValueError(f"optimizer_state_dtype={state_dtype!r} is about AdamW, but {reason}. {_OTHERS}")
            _take(optimizer, _DTYPES[state_dtype], report)
        elif fused is True:
            if reason := reason or _no_gain(optimizer):
                report.refuse(f"fused_optimizer=True: {reason}; it steps as it is")
            else:
                _take(optimizer, None, report)
        elif fused == "auto" and not reason and not _no_gain(optimizer) and left_open(optimizer):
            _take(optimizer, None, report)


def take_over_plain(trainer: Any, state_dtype: OptimizerStateDtype | None, fused: bool | Auto, report: Any) -> None:
    """The same for the callback alone, under strategies that leave parameters as they are.

    Raises:
        ValueError: ``state_dtype`` is given under another strategy.
    """
    lightnings = ("lightning.", "pytorch_lightning.")
    known = [k.__name__ for k in type(trainer.strategy).__mro__ if k.__module__.startswith(lightnings)]
    if any(k.__name__ == "_LigerFSDP" for k in type(trainer.strategy).__mro__):
        return  # has done so itself
    if known and known[0] in _PLAIN_STRATEGIES:
        take_over(trainer.strategy.optimizers, state_dtype, fused, report, sharded=False)
    elif state_dtype is not None:
        raise ValueError(
            f"optimizer_state_dtype={state_dtype!r} does not fit {type(trainer.strategy).__name__}, which keeps parameters "
            "or optimizer state in a form of its own. Use strategy='liger_fsdp', 'ddp' or a single device, or leave it out."
        )


def state_bytes(optimizer: Optimizer) -> int | None:
    """Bytes of both moments on this rank once all are made; None where the optimizer steps as it is."""
    fused = fused_step_of(optimizer)
    if fused is None:
        return None
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return sum(local(p).numel() * fused.moment_bytes(p) for p in parameters)


def _no_gain(optimizer: Optimizer) -> str:
    """Why one launch with moments in the parameters' dtype is no choice here, or ``""``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if parameters[0].device.type != "cuda":
        return f"its parameters are on {parameters[0].device.type}, where PyTorch's own step is as good"
    if any(p.dtype != torch.float32 for p in parameters):
        return "with moments in bf16 that are not rounded stochastically; ask for optimizer_state_dtype='bf16'"
    if not kernel_runs(parameters[0].device):
        return "Triton is not installed"
    device = local(parameters[0]).device
    return kernel_fails(device, torch.float32, torch.float32)


def _take(optimizer: Optimizer, state_dtype: torch.dtype | None, report: OptimizerReport) -> None:
    if fused_step_of(optimizer) is None:
        parameters = [local(p) for group in optimizer.param_groups for p in group["params"]]
        runs, device = kernel_runs(parameters[0].device), parameters[0].device
        if runs:
            kinds = {p.dtype for p in parameters}
            failures = {kernel_fails(device, dtype, state_dtype or dtype) for dtype in kinds} - {""}
            for reason in sorted(failures):
                report.refuse(f"PyTorch's operators, one parameter at a time: {reason}")
            runs = not failures
        report.by = "Triton" if runs else "PyTorch's operators"
        FusedStep(optimizer, state_dtype, kernel=runs)
    report.applied += 1
    report.state_dtype = "bf16" if state_dtype is torch.bfloat16 else "fp32"
    report.bytes += state_bytes(optimizer) or 0
