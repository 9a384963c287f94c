"""``gelu(gate) * up`` with the exact (erf) GELU, which Liger does not have. Imported where Triton is known to work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _exact_geglu_forward_kernel(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    gate = tl.load(gate_ptr + at, mask=mask, other=0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=mask, other=0)
    act = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    tl.store(out_ptr + at, act.to(up.dtype) * up, mask=mask)


@triton.jit
def _exact_geglu_backward_kernel(gate_ptr, up_ptr, grad_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    grad = tl.load(grad_ptr + at, mask=mask, other=0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=mask, other=0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=mask, other=0)
    cdf = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
    slope = cdf + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    act = (gate * cdf).to(up.dtype).to(tl.float32)
    d_gate = grad * up.to(tl.float32) * slope
    tl.store(gate_ptr + at, d_gate.to(up.dtype), mask=mask)
    tl.store(up_ptr + at, (grad * act).to(up.dtype), mask=mask)


def exact_geglu_forward(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(gate, up, gelu(gate) * up)`` for contiguous tensors of one shape and dtype."""
    out = torch.empty_like(up)
    n = out.numel()
    with torch.cuda.device_of(out):
        _exact_geglu_forward_kernel[(triton.cdiv(n, _BLOCK),)](gate, up, out, n, BLOCK=_BLOCK)
    return gate, up, out


def exact_geglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both factors, written over ``gate`` and ``up``; ``grad`` must be contiguous."""
    n = grad.numel()
    with torch.cuda.device_of(grad):
        _exact_geglu_backward_kernel[(triton.cdiv(n, _BLOCK),)](gate, up, grad, n, BLOCK=_BLOCK)
    return gate, up
