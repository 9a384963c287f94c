"""What stands for fused kernels on the ``meta`` device: the shapes that they keep, allocate and give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.kernels.mlps import GatedMLPBinding
from lightning_liger.kernels.norms import NormBinding
from lightning_liger.kernels.registry import KernelBinding
from lightning_liger.patching import Rebound

_NAME = "liger_counted"


class _Norm(torch.autograd.Function):
    """A kernel that gives a tensor like the one it keeps, as does its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.empty_like(gradient)


class _Gated(torch.autograd.Function):
    """A kernel that keeps gate and up, and writes their gradients over them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return gate.detach(), up.detach()


def kernel_shapes(bound: Any, twin: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """What stands for a module's Triton kernel: norms keep their input, gated MLPs gate and up."""
    while isinstance(bound, Rebound) and not isinstance(bound, KernelBinding):
        bound = bound.previous
    if isinstance(bound, NormBinding):
        return _Norm.apply
    if not isinstance(bound, GatedMLPBinding):
        return None
    layers: Any = twin._modules
    spec = bound.spec

    def gated(x: Tensor) -> Tensor:
        if spec.gate == spec.up:
            both = layers[spec.gate](x)
            gate, up = (t.contiguous() for t in both.chunk(2, dim=-1))
        else:
            gate, up = layers[spec.gate](x), layers[spec.up](x)
        return layers[spec.down](_Gated.apply(gate, up))

    return gated


class _Attention(torch.autograd.Function):
    """The shapes of a fused attention kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, attended: Callable[..., None]) -> Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1])
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        attended(output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


@contextmanager
def counted_attention(config: Any, attended: Callable[..., None]) -> Iterator[None]:
    """Every layer attends by a stand-in; ``attended`` is told what it gave."""
    from transformers.modeling_utils import AttentionInterface

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
        return _Attention.apply(query, key, value, attended), None

    mapping = AttentionInterface._global_mapping
    before = config._attn_implementation_internal
    mapping[_NAME] = attention
    config._attn_implementation_internal = _NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        mapping.pop(_NAME, None)
