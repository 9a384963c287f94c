"""Rotary functions of transformers and rotary modules of torchtune's kind, on real kernels, against themselves."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from models import only_kernels
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from rotary_cases import CASES, HEADS, B, D, NeighboursRotary, S, assert_alike, calling, modelling, rotary_case


@pytest.mark.parametrize("name", CASES)
def test_rotary_functions_of_transformers(name: str) -> None:
    function, args, kwargs = rotary_case(name)
    layer = calling(function)
    handle = only_kernels(nn.ModuleList([layer]))
    kept = [a.clone() for a in args]
    assert_alike(layer, function, args, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(args, kept, strict=True)), "arguments written over"
    op = handle.report.kernels.ops["rope"]
    assert (op.applied, op.called, op.calls, op.original_calls) == (1, 1, 2, {})


class HalvesRope(nn.Module):
    """``(B, heads, S, D)``, halves, the angles computed anew, the result in the wider dtype."""

    def __init__(self, head_dim: int = D) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        theta = 100 ** (-torch.arange(self.head_dim // 2) / (self.head_dim // 2))
        turns = torch.outer(torch.arange(x.size(2)) + offset, theta)
        cos, sin = turns.cos(), turns.sin()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class StretchingRope(HalvesRope):
    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        return super().forward(x, offset) + x.mean()


def test_a_rotary_module_with_a_cache_of_its_own() -> None:
    module, plain = NeighboursRotary(), NeighboursRotary()
    handle = only_kernels(nn.ModuleDict({"a": module, "b": module}))
    x = torch.randn(B, S, HEADS, D)
    positions = torch.randint(0, 16, (B, S))
    for kwargs in ({}, {"input_pos": positions}):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            ours, theirs = (x.detach().to(dtype).clone().requires_grad_() for _ in range(2))
            a, b = module(ours, **kwargs), plain(theirs, **kwargs)
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            seed = torch.randn_like(a)
            a.backward(seed)
            b.backward(seed)
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    op = handle.report.kernels.ops["rope"]
    assert (op.applied, op.calls, op.original_calls) == (1, 4, {})
    assert op.sources == {"structural": 1}


def test_a_rotary_module_that_turns_halves() -> None:
    module, plain = HalvesRope(), HalvesRope()
    handle = only_kernels(nn.ModuleList([module]))
    x = torch.randn(B, HEADS, S, D)
    torch.testing.assert_close(module(x), plain(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module(x, offset=3), plain(x, 3), rtol=1e-5, atol=1e-5)
    assert module(x.bfloat16()).dtype == plain(x.bfloat16()).dtype == torch.float32
    assert handle.report.kernels.ops["rope"].calls == 3


def test_a_module_that_does_more_than_turning_is_refused() -> None:
    op = only_kernels(nn.ModuleList([StretchingRope()])).report.kernels.ops["rope"]
    assert (op.applied, op.found) == (0, 1)
    assert "StretchingRope computes something else than the kernel" in next(iter(op.refused))


def test_modules_that_make_angles_are_no_rotary_modules() -> None:
    rotary = modelling("llama").LlamaRotaryEmbedding
    config = importlib.import_module("transformers").LlamaConfig(hidden_size=32, num_attention_heads=4)
    assert not only_kernels(nn.ModuleList([rotary(config)])).report.kernels.ops


@pytest.mark.skipif(importlib.util.find_spec("torchtune") is None, reason="torchtune is not installed")
def test_torchtune() -> None:
    # the package itself asks for torchao at once; the module of its embeddings needs torch alone
    origin = importlib.util.find_spec("torchtune").origin  # type: ignore[union-attr]
    root = Path(str(origin)).parent
    for file, name in (
        ("modules/position_embeddings.py", "RotaryPositionalEmbeddings"),
        ("models/llama3_1/_position_embeddings.py", "Llama3ScaledRoPE"),
        ("models/phi3/_position_embeddings.py", "Phi3RotaryPositionalEmbeddings"),
        ("models/qwen2/_positional_embeddings.py", "Qwen2RotaryPositionalEmbeddings"),
    ):
        spec = importlib.util.spec_from_file_location(f"torchtune_{name}", root / file)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        module, plain = (getattr(made, name)(dim=D, max_seq_len=16) for _ in range(2))
        handle = only_kernels(nn.ModuleList([module]))
        x, positions = torch.randn(B, S, HEADS, D), torch.randint(0, 16, (B, S))
        torch.testing.assert_close(module(x), plain(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(module(x, input_pos=positions), plain(x, input_pos=positions), rtol=1e-5, atol=1e-5)
        assert handle.report.kernels.ops["rope"].calls == 2, name
