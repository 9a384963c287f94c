"""The kernels' formulas in plain PyTorch, for looking at models where no kernel can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str) -> Tensor:
    """See :func:`lightning_liger.kernels.functions.rms_norm`."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    if casting_mode == "llama":
        return y.to(x.dtype) * (weight + offset)
    return (y * (weight.float() + offset)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See :func:`lightning_liger.kernels.functions.layer_norm`."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def gated(activation: str, gate: Tensor, up: Tensor, *, overwrite: bool) -> Tensor:
    """See :func:`lightning_liger.kernels.functions.gated`."""
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """See :func:`lightning_liger.kernels.functions.rope`."""
    half = rotary_dim // 2
    c, s = cos[:, None, :, :half], sin[:, None, :, :half]

    def turn(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:rotary_dim]
        return torch.cat((a * c - b * s, b * c + a * s, x[..., rotary_dim:].to((a * c).dtype)), -1)

    return turn(q), turn(k)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """See :func:`lightning_liger.kernels.functions.experts`."""
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, place = torch.where(index == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        part = F.linear(F.silu(gate) * up, down[expert]) * weights[token, place, None]
        out = out.index_add(0, token, part.to(x.dtype))
    return out


@contextmanager
def instead_of_triton() -> Iterator[None]:
    """Compare and bind these in place of the kernels, on the CPU, until the block ends. For one thread only."""
    from lightning_liger.kernels import apply, device, mlps, norms, rotary
    from lightning_liger.kernels import experts as experts_module

    swaps = [(norms, "rms_norm", rms_norm), (norms, "layer_norm", layer_norm), (mlps, "gated", gated)]
    swaps += [(rotary, "rope", rope), (experts_module, "experts", experts), (apply, "why_not", lambda: "")]
    swaps += [(m, "interpreted", lambda: True) for m in (device, experts_module)]
    with ExitStack() as stack:
        for module, name, value in swaps:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
