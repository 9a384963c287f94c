"""The kernels' formulas in plain PyTorch, for looking at models where no kernel can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
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


def relu_squared(x: Tensor) -> Tensor:
    """See :func:`lightning_liger.kernels.functions.relu_squared`."""
    return F.relu(x).square()


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, pairs: str = "halves", wide: bool = False
) -> tuple[Tensor, Tensor]:
    """See :func:`lightning_liger.kernels.rotation.rope`."""
    half = rotary_dim // 2
    c, s = cos[:, None, :, :half], sin[:, None, :, :half]
    if wide or pairs == "neighbours":
        q, k, c, s = q.float(), k.float(), c.float(), s.float()

    def turn(x: Tensor) -> Tensor:
        x, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        a, b = (x[..., :half], x[..., half:]) if pairs == "halves" else (x[..., 0::2], x[..., 1::2])
        turned = (a * c - b * s, b * c + a * s)
        both = torch.stack(turned, -1).flatten(-2) if pairs == "neighbours" else torch.cat(turned, -1)
        return torch.cat((both, rest.to(both.dtype)), -1)

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
    from lightning_liger.kernels import activations, apply, device, gated_norms, mlps, norms, rotary_function
    from lightning_liger.kernels import experts as experts_module

    swaps: list[tuple[Any, str, Any]] = [(m, "rms_norm", rms_norm) for m in (norms, gated_norms)]
    swaps += [(m, "gated", gated) for m in (mlps, gated_norms)]
    swaps += [(norms, "layer_norm", layer_norm), (activations, "relu_squared", relu_squared)]
    swaps += [(rotary_function, "rope", rope), (experts_module, "experts", experts), (apply, "why_not", lambda: "")]
    swaps += [(m, "interpreted", lambda: True) for m in (device, experts_module)]
    with ExitStack() as stack:
        for module, name, value in swaps:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
