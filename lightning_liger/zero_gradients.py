"""Multiplying the gradients that DeepSpeed keeps, at the moment when its optimizer takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def cannot_scale(engine: Any) -> str:
    """Why the gradients of this engine cannot be multiplied, or ``""``."""
    if getattr(engine, "zenflow", False):
        return "ZenFlow takes gradients out of the optimizer's turn"
    optimizer = engine.optimizer
    if hasattr(optimizer, "loss_scale_config"):
        return f"{type(optimizer).__name__} scales its losses in a way of its own; use ZeRO stage 1, 2 or 3"
    if getattr(optimizer, "custom_loss_scaler", False):
        return "the scale of its losses is set from outside (override_loss_scale)"
    return ""


def averaged_over(engine: Any) -> float:
    """What the engine divides the sum of its ranks' and micro-batches' gradients by, beside the ranks themselves."""
    return float(engine.gradient_accumulation_steps())


def averages_ranks(engine: Any) -> bool:
    """Whether ranks are averaged; with ``"gradient_allreduce_op": "sum"`` they are added."""
    return bool(getattr(engine, "gradient_average", True))


def on_optimizer_step(engine: Any, factor: Callable[[], torch.Tensor | None]) -> Callable[..., Any]:
    """``engine.step``, whose optimizer finds its gradients multiplied.

    Args:
        factor: asked on every rank before the optimizer steps; None leaves the gradients as they are.
    """
    step = engine.step

    def scaled(*args: Any, **kwargs: Any) -> Any:
        multiplied = factor() if engine.is_gradient_accumulation_boundary() else None
        if multiplied is None:
            return step(*args, **kwargs)
        with _multiplied(engine.optimizer, multiplied):
            return step(*args, **kwargs)

    return scaled


@contextmanager
def _multiplied(optimizer: Any, factor: torch.Tensor) -> Iterator[None]:
    if not hasattr(optimizer, "loss_scaler"):
        # BF16_Optimizer keeps fp32 copies; without ZeRO they are the parameters' own
        flat = getattr(optimizer, "fp32_groups_gradients_flat", None)
        own = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for gradient in own if flat is None else flat:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
        yield
        return
    # ZeRO divides gradients by the scale of the losses, in fp32 and before it clips
    scaler, times = optimizer.loss_scaler, float(factor)
    before = scaler.cur_scale
    scaler.cur_scale = asked = before / times
    try:
        yield
    finally:
        # a dynamic scale may have changed in this step
        scaler.cur_scale = before if scaler.cur_scale == asked else scaler.cur_scale * times
