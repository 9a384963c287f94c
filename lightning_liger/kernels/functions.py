"""Differentiable functions over Liger's Triton kernels that leave their arguments as they were.

Liger's own autograd functions write gradients over saved activations and incoming gradients (``in_place``, SwiGLU,
GEGLU) and rotate captured queries and keys in place. Here a buffer is only overwritten when nobody else can read it.
A second derivative raises, instead of being silently absent.

Everything is built on first use: importing this module needs neither Liger nor Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _graph_is_kept() -> bool:
    """Inside ``backward``: whether another backward through the same graph may follow (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward``, with an error under ``create_graph=True``: what it does is invisible to autograd."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Triton kernels have no second derivative (create_graph=True). Use kernels=False for this module."
            )
        return backward(ctx, *grads)

    return checked


@functools.cache
def _rms_norm_function() -> Any:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    class RMSNorm(LigerRMSNormFunction):
        backward = staticmethod(once(LigerRMSNormFunction.backward))

    return RMSNorm


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str) -> Tensor:
    """``x / rms(x) * (weight + offset)`` over the last dimension.

    Args:
        x: ``(..., H)``, contiguous or not.
        weight: ``(H,)`` in the dtype of ``x``, or None for no scale.
        casting_mode: ``"llama"`` rounds to the dtype of ``x`` before the scale, ``"gemma"`` after it.

    Returns:
        ``(..., H)`` in the dtype of ``x``.
    """
    return _rms_norm_function().apply(x, weight, eps, offset, casting_mode, False, None)


@functools.cache
def _layer_norm_function() -> Any:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    class LayerNorm(LigerLayerNormFunction):
        backward = staticmethod(once(LigerLayerNormFunction.backward))

    return LayerNorm


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer normalisation over the last dimension: ``x`` ``(..., H)``; ``weight`` and ``bias`` ``(H,)``; one dtype."""
    return _layer_norm_function().apply(x, weight, bias, eps)


class _GatedFunction(torch.autograd.Function):
    """``act(gate) * up``; subclasses name the kernels. Backward may overwrite the saved activations."""

    kernels: Callable[[], tuple[Callable[..., Any], Callable[..., Any]]]

    @classmethod
    def run(cls, gate: Tensor, up: Tensor, overwrite: bool) -> Tensor:
        return cls.apply(gate, up, overwrite)

    @staticmethod
    def _forward(kernel: Callable[..., Any], ctx: Any, gate: Tensor, up: Tensor, overwrite: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.overwrite = overwrite
        return kernel(gate, up)[2]

    @staticmethod
    def _backward(kernel: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if not ctx.overwrite or _graph_is_kept():
            gate, up = gate.clone(), up.clone()
        d_gate, d_up = kernel(gate, up, grad.contiguous())
        return d_gate, d_up, None


class _SiLUMul(_GatedFunction):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, overwrite: bool) -> Tensor:
        from liger_kernel.ops.swiglu import swiglu_forward

        return _GatedFunction._forward(swiglu_forward, ctx, gate, up, overwrite)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from liger_kernel.ops.swiglu import swiglu_backward

        return _GatedFunction._backward(swiglu_backward, ctx, grad)


class _TanhGELUMul(_GatedFunction):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, overwrite: bool) -> Tensor:
        from liger_kernel.ops.geglu import geglu_forward

        return _GatedFunction._forward(geglu_forward, ctx, gate, up, overwrite)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from liger_kernel.ops.geglu import geglu_backward

        return _GatedFunction._backward(geglu_backward, ctx, grad)


class _ExactGELUMul(_GatedFunction):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, overwrite: bool) -> Tensor:
        from lightning_liger.kernels.exact_geglu import exact_geglu_forward

        return _GatedFunction._forward(exact_geglu_forward, ctx, gate, up, overwrite)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from lightning_liger.kernels.exact_geglu import exact_geglu_backward

        return _GatedFunction._backward(exact_geglu_backward, ctx, grad)


_GATED: dict[str, type[_GatedFunction]] = {"silu": _SiLUMul, "gelu_tanh": _TanhGELUMul, "gelu": _ExactGELUMul}


def gated(activation: str, gate: Tensor, up: Tensor, *, overwrite: bool) -> Tensor:
    """``activation(gate) * up``, elementwise.

    Args:
        activation: ``"silu"``, ``"gelu_tanh"`` or ``"gelu"``.
        gate, up: ``(..., I)``, one shape and dtype.
        overwrite: backward may write the gradients over ``gate`` and ``up``: nobody else reads them. It never does
            while the graph is kept for another backward.

    Returns:
        ``(..., I)`` in their dtype.
    """
    return _GATED[activation].run(gate, up, overwrite)


@functools.cache
def _relu_squared_function() -> Any:
    from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction

    class ReLUSquared(LigerReLUSquaredFunction):
        backward = staticmethod(once(LigerReLUSquaredFunction.backward))

    return ReLUSquared


def relu_squared(x: Tensor) -> Tensor:
    """``relu(x) ** 2``, elementwise; shape and dtype of ``x``."""
    return _relu_squared_function().apply(x)


@functools.cache
def _experts_function() -> Any:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    class Experts(LigerFusedMoEFunction):
        backward = staticmethod(once(LigerFusedMoEFunction.backward))

    return Experts


def experts(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """SwiGLU experts as grouped matrix products, weighted and summed per token.

    Args:
        x: ``(T, H)``. gate_up: ``(E, 2 I, H)``. down: ``(E, H, I)``. All of one dtype.
        index: ``(T, K)`` int32, the experts of each token. weights: ``(T, K)``, their weights.

    Returns:
        ``(T, H)`` in the dtype of ``x``.
    """
    return _experts_function().apply(x, gate_up, down, index, weights)
