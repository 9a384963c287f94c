"""Rotary functions of many shapes: replaced for one layer, or refused for a reason."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import batch, only_kernels, step, tiny
from torch import Tensor

from lightning_liger.kernels.rebuilt import with_globals


def rotate(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotary_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One tensor, result in the dtype of the input, as in litgpt."""
    return (x * cos[:, None] + rotate(x) * sin[:, None]).to(x.dtype)


def apply_rotary_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``cos`` has one entry per pair, as in GPT-OSS."""
    cos, sin = (torch.cat((t, t), -1)[:, None] for t in (cos, sin))
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def apply_rotary_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours are a pair, with one angle each."""
    cos, sin = (t.repeat_interleave(2, -1)[:, None] for t in (cos, sin))
    turn = lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)  # noqa: E731
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        wrapper.calls += 1
        return function(*args, **kwargs)

    wrapper.calls = 0
    return wrapper


def apply_rotary_stretched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = rotary_pair(q, k, cos, sin)
    return 1.1 * q, 1.1 * k


class Layer(nn.Module):
    """An attention layer reduced to what matters here: ``forward`` finds its rotary function among its globals."""

    heads, kv_heads, head_dim = 4, 2, 8

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 32), nn.Linear(16, 16)

    def states(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, s, _ = x.shape
        return self.q(x).view(b, s, self.heads, -1).transpose(1, 2), self.k(x).view(b, s, self.kv_heads, -1).transpose(
            1, 2
        )


class PairLayer(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = rotary_pair(*self.states(x), cos, sin)
        return q.sum(1) + k.sum(1)


class DecoratedLayer(Layer):
    @decorated
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = rotary_pair(*self.states(x), cos, sin)
        return q.sum(1) + k.sum(1)


class SuperLayer(PairLayer):
    """Needs the ``__class__`` cell of its closure, and a keyword default."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *, factor: float = 2.0) -> Tensor:
        q, k = rotary_pair(*super().states(x), cos, sin)
        return factor * (q.sum(1) + k.sum(1))


class SingleLayer(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (apply_rope(t, cos, sin) for t in self.states(x))
        return q.sum(1) + k.sum(1)


class HalfLayer(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = apply_rotary_half(*self.states(x), cos, sin)
        return q.sum(1) + k.sum(1)


def run(layer: nn.Module, half: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, dtype=dtype, requires_grad=True)
    angles = torch.randn(2, 5, 4)
    angles = angles if half else torch.cat((angles, angles), -1)
    out = layer(x, angles.cos(), angles.sin())
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize(
    ("kind", "calls"), ((PairLayer, 1), (DecoratedLayer, 1), (SuperLayer, 1), (SingleLayer, 2), (HalfLayer, 1))
)
def test_replaced_for_one_layer(kind: type[Layer], calls: int) -> None:
    torch.manual_seed(1)
    layer, twin = kind(), kind()
    twin.load_state_dict(layer.state_dict())
    half = kind is HalfLayer
    module = nn.ModuleList([layer])
    handle = only_kernels(module)
    for a, b in zip(run(layer, half), run(twin, half), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    op = handle.report.kernels.ops["rope"]
    assert (op.applied, op.calls, op.original_calls) == (1, calls, {})
    assert "forward" not in vars(twin)


def test_the_dtype_is_that_of_the_original() -> None:
    """bf16 states with fp32 angles: one function gives fp32, the other goes back to bf16."""
    for kind, expected in ((PairLayer, torch.float32), (SingleLayer, torch.bfloat16)):
        layer = kind().bfloat16()
        handle = only_kernels(nn.ModuleList([layer]))
        assert run(layer, dtype=torch.bfloat16)[0].dtype == expected
        assert handle.report.kernels.ops["rope"].calls and not handle.report.kernels.ops["rope"].original_calls


def test_decorators_still_run() -> None:
    layer = DecoratedLayer()
    only_kernels(nn.ModuleList([layer]))
    before = DecoratedLayer.forward.calls
    run(layer)
    assert DecoratedLayer.forward.calls == before + 1


class StretchedLayer(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = apply_rotary_stretched(*self.states(x), cos, sin)
        return q.sum(1) + k.sum(1)


class ChoosingLayer(Layer):
    """The configuration decides which function is called, as in DeepSeek V3."""

    interleaved = True

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.interleaved:
            q, k = apply_rotary_interleaved(*self.states(x), cos, sin)
        else:
            q, k = rotary_pair(*self.states(x), cos, sin)
        return q.sum(1) + k.sum(1)


class HalfKnownLayer(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turn = apply_rotary_stretched if self.training else rotary_pair
        q, k = turn(*self.states(x), cos, sin)
        return q.sum(1) + k.sum(1)


def test_another_rotation_is_refused() -> None:
    for kind in (StretchedLayer, HalfKnownLayer):
        op = only_kernels(nn.ModuleList([kind()])).report.kernels.ops["rope"]
        assert (op.applied, op.found) == (0, 1)
        reason = f"{kind.__name__}: apply_rotary_stretched does not turn pairs of entries by one angle per position"
        assert op.refused == {reason: 1}


def test_of_several_functions_the_one_that_is_called_is_replaced() -> None:
    for interleaved in (False, True):
        layer = ChoosingLayer()
        layer.interleaved = interleaved
        twin = ChoosingLayer()
        twin.load_state_dict(layer.state_dict())
        twin.interleaved = interleaved
        op = only_kernels(nn.ModuleList([layer])).report.kernels.ops["rope"]
        for a, b in zip(run(layer, interleaved), run(twin, interleaved), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert (op.applied, op.called, op.calls, op.original_calls) == (1, 1, 1, {})


def test_a_layer_without_positions_is_none() -> None:
    layer = PairLayer()
    layer.use_rope = 0
    assert not only_kernels(nn.ModuleList([layer])).report.kernels.ops


def test_angles_that_are_not_repeated_in_halves_are_refused() -> None:
    class Interleaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.rand(4))

        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angles = (position_ids[..., None] * self.inv_freq).repeat_interleave(2, -1)
            return angles.cos(), angles.sin()

    handle = only_kernels(nn.ModuleList([PairLayer(), Interleaving()]))
    assert handle.report.kernels.ops["rope"].refused == {
        "PairLayer: Interleaving does not repeat its angles in halves": 1
    }


def test_shapes_that_were_not_compared_run_the_original() -> None:
    layer = PairLayer()
    handle = only_kernels(nn.ModuleList([layer]))
    layer.forward  # noqa: B018
    replacement = layer.forward
    run(layer)
    rope = replacement._forward.__globals__["rotary_pair"]
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    angles = torch.randn(2, 5, 8)
    other = torch.randn(4, 2, 5, 8)
    swapped = rope(other, other, angles.cos(), angles.sin(), unsqueeze_dim=0)
    expected = rotary_pair(other, other, angles.cos(), angles.sin(), unsqueeze_dim=0)
    assert all(torch.equal(a, b) for a, b in zip(swapped, expected, strict=True))
    trained = angles.cos().requires_grad_()
    assert rope(q, k, trained, angles.sin())[0].requires_grad
    assert handle.report.kernels.ops["rope"].original_calls == {
        "PairLayer: called with unsqueeze_dim=0": 1,
        "PairLayer: cos and sin are trained, or of two dtypes": 1,
    }


def test_partial_rotary() -> None:
    model = tiny("nemotron", partial_rotary_factor=0.5)
    handle = only_kernels(model)
    loss, _ = step(model)
    assert loss == pytest.approx(step(tiny("nemotron", partial_rotary_factor=0.5))[0], rel=1e-5)
    ops = handle.report.kernels.ops
    assert ops["rope"].calls == 2 and not ops["rope"].original_calls
    assert ops["layer_norm"].applied == 5, "LayerNorm with weight + 1"


def test_the_key_value_cache_still_works() -> None:
    model = tiny("llama").eval()
    expected = model(**batch(), use_cache=True)
    only_kernels(model)
    first = model(input_ids=batch()["input_ids"][:, :5], use_cache=True)
    second = model(input_ids=batch()["input_ids"][:, 5:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(second.logits, expected.logits[:, 5:], rtol=1e-4, atol=1e-5)


def test_with_globals_changes_no_function() -> None:
    original = DecoratedLayer.forward
    inner = original.__wrapped__
    copied = with_globals(original, {"rotary_pair": "other"})
    assert isinstance(copied, types.FunctionType) and copied is not original
    assert inner.__globals__["rotary_pair"] is rotary_pair
    assert original.__wrapped__ is inner

    class Callable_:
        def __call__(self) -> None: ...

    with pytest.raises(ValueError, match="not a plain function"):
        with_globals(Callable_(), {})
