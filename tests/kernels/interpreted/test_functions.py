"""The autograd functions: right, and without writing over anything that somebody else can read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.kernels import functions as K
from lightning_liger.kernels.rotation import rope


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def _angles() -> tuple[Tensor, Tensor]:
    f = torch.randn(2, 5, 4)
    f = torch.cat((f, f), -1)
    return f.cos(), f.sin()


def _apart(x: Tensor) -> Tensor:
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def _turn_neighbours(x: Tensor) -> Tensor:
    return _turn(_apart(x), COS, SIN).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


COS, SIN = _angles()
ROPE_SHAPES = ((2, 4, 5, 8), (2, 2, 5, 8))
CASES: dict[str, tuple[Callable[..., object], Callable[..., object], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (lambda x, w: K.rms_norm(x, w, 1e-6, 0.0, "llama"), _rms, ((3, 5, 8), (8,))),
    "rms_norm+1": (lambda x, w: K.rms_norm(x, w, 1e-6, 1.0, "gemma"), lambda x, w: _rms(x, w + 1), ((3, 5, 8), (8,))),
    "layer_norm": (
        lambda x, w, b: K.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-5),
        ((3, 5, 8), (8,), (8,)),
    ),
    "silu": (lambda g, u: K.gated("silu", g, u, overwrite=True), lambda g, u: F.silu(g) * u, ((3, 8), (3, 8))),
    "gelu": (lambda g, u: K.gated("gelu", g, u, overwrite=True), lambda g, u: F.gelu(g) * u, ((3, 8), (3, 8))),
    "gelu_tanh": (
        lambda g, u: K.gated("gelu_tanh", g, u, overwrite=True),
        lambda g, u: F.gelu(g, approximate="tanh") * u,
        ((3, 8), (3, 8)),
    ),
    "neighbours": (
        lambda q, k: rope(q, k, COS, SIN, 8, "neighbours"),
        lambda q, k: (_turn_neighbours(q), _turn_neighbours(k)),
        ROPE_SHAPES,
    ),
    "gathered": (
        lambda q, k: rope(q, k, COS, SIN, 8, "gathered"),
        lambda q, k: (_turn(_apart(q), COS, SIN), _turn(_apart(k), COS, SIN)),
        ROPE_SHAPES,
    ),
    "relu_squared": (K.relu_squared, lambda x: F.relu(x).square(), ((3, 5, 8),)),
    "rope": (
        lambda q, k: rope(q, k, COS, SIN, 8),
        lambda q, k: (_turn(q, COS, SIN), _turn(k, COS, SIN)),
        ROPE_SHAPES,
    ),
}


def _inputs(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def _sum(out: object) -> Tensor:
    parts = [out] if isinstance(out, Tensor) else list(out)  # type: ignore[call-overload]
    return sum((p * torch.linspace(-1, 1, p.numel()).view(p.shape)).sum() for p in parts)  # type: ignore[return-value]


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_torch(name: str) -> None:
    ours, plain, shapes = CASES[name]
    a, b = (torch.autograd.grad(_sum(f(*x)), x) for f in (ours, plain) for x in [_inputs(shapes)])
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_second_backward_gives_the_same(name: str) -> None:
    ours, _, shapes = CASES[name]
    x = _inputs(shapes)
    loss = _sum(ours(*x))
    first = torch.autograd.grad(loss, x, retain_graph=True)
    second = torch.autograd.grad(loss, x)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_arguments_and_incoming_gradients_stay_as_they_are(name: str) -> None:
    ours, _, shapes = CASES[name]
    x = _inputs(shapes)
    before = [t.detach().clone() for t in x]
    out = ours(*x)
    parts = [out] if isinstance(out, Tensor) else list(out)  # type: ignore[call-overload]
    seeds = [torch.randn_like(p) for p in parts]
    kept = [s.clone() for s in seeds]
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True)), "changed in forward"
    torch.autograd.grad(parts, x, seeds, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(seeds, kept, strict=True)), "gradients written over"
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True)), "changed in backward"


def test_only_activations_that_are_ours_are_written_over() -> None:
    gate, up = _inputs(((3, 8), (3, 8)))
    kept = gate.detach().clone()
    torch.autograd.grad(K.gated("silu", gate, up, overwrite=False).sum(), (gate, up))
    assert torch.equal(gate, kept)


@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_raises(name: str) -> None:
    ours, _, shapes = CASES[name]
    x = _inputs(shapes)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(_sum(ours(*x)), x, create_graph=True)


def test_rope_returns_what_the_product_with_cos_would_have() -> None:
    q, k = (t.bfloat16() for t in _inputs(ROPE_SHAPES))
    assert [t.dtype for t in rope(q, k, COS, SIN, 8)] == [torch.float32] * 2
    assert [t.dtype for t in rope(q, k, COS.bfloat16(), SIN.bfloat16(), 8)] == [torch.bfloat16] * 2


def test_only_the_first_entries_are_rotated() -> None:
    q, k = _inputs(((2, 4, 5, 12), (2, 2, 5, 12)))
    q2, k2 = rope(q, k, COS, SIN, 8)
    assert torch.equal(q2[..., 8:], q[..., 8:]) and torch.equal(k2[..., 8:], k[..., 8:])
    torch.testing.assert_close(q2[..., :8], _turn(q[..., :8], COS, SIN))
