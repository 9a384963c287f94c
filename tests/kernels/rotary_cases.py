"""Rotary functions of transformers, with arguments as their layers give them, and a rotary module like torchtune's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

B, S, HEADS, KEYS, D = 2, 5, 4, 2, 8


def modelling(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


class Calls(nn.Module):
    """A layer that does nothing but call a rotary function by a global name."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(2, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return rotary(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def calling(function: Callable[..., Any]) -> nn.Module:
    forward = FunctionType(Calls.forward.__code__, {"rotary": function, "__name__": __name__}, "forward")
    return type("Calls", (Calls,), {"forward": forward, "__module__": __name__})()


def angles(*lead: int, width: int, repeat: str = "") -> tuple[Tensor, Tensor]:
    a = torch.randn(*lead, width)
    if repeat:
        a = torch.cat((a, a), -1) if repeat == "halves" else a.repeat_interleave(2, -1)
    return a.cos(), a.sin()


def pair(*shape: int) -> list[Tensor]:
    """Queries and keys; ``-1`` stands for the heads."""
    return [torch.randn([n if s == -1 else s for s in shape]) for n in (HEADS, KEYS)]


def complex_(lead: tuple[int, ...]) -> Tensor:
    return torch.complex(*angles(*lead, width=D // 2))


# name: (modelling module, function, its tensors, keyword arguments)
Case = tuple[str, str, Callable[[], tuple[Any, ...]], dict[str, Any]]
CASES: dict[str, Case] = {
    "glm4, part of the head": (
        "glm4",
        "apply_rotary_pos_emb",
        lambda: (*pair(B, -1, S, D), *angles(B, S, width=2, repeat="halves")),
        {},
    ),
    "glm4v": (
        "glm4v",
        "apply_rotary_pos_emb",
        lambda: (*pair(B, -1, S, D), *angles(B, S, width=4, repeat="neighbours")),
        {},
    ),
    "cohere": (
        "cohere",
        "apply_rotary_pos_emb",
        lambda: (*pair(B, -1, S, D), *angles(1, S, width=4, repeat="neighbours")),
        {},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "apply_rotary_pos_emb_interleave",
        lambda: (*pair(B, -1, S, D), *angles(1, S, width=4, repeat="halves")),
        {},
    ),
    "deepseek_v4, end of the head": (
        "deepseek_v4",
        "apply_rotary_pos_emb",
        lambda: (torch.randn(B, HEADS, S, D), *angles(B, S, width=2)),
        {},
    ),
    "deepseek_v2": ("deepseek_v2", "apply_rotary_emb", lambda: (*pair(B, -1, S, D), complex_((B, S))), {}),
    "llama4": ("llama4", "apply_rotary_emb", lambda: (*pair(B, S, -1, D), complex_((1, S))), {}),
    "llama4, images": ("llama4", "vision_apply_rotary_emb", lambda: (*pair(B, S, -1, D), complex_((S, 1))), {}),
    "qwen2_vl, images": (
        "qwen2_vl",
        "apply_rotary_pos_emb_vision",
        lambda: (*pair(S, -1, D), *angles(S, width=4, repeat="halves")),
        {},
    ),
    "gemma4": (
        "gemma4",
        "apply_rotary_pos_emb",
        lambda: (torch.randn(B, S, HEADS, D), *angles(B, S, width=4, repeat="halves")),
        {"unsqueeze_dim": 2},
    ),
    "gptj": (
        "gptj",
        "apply_rotary_pos_emb",
        lambda: (torch.randn(B, S, HEADS, D), *angles(B, S, width=4)),
        {},
    ),
    "llama, one sequence's angles": (
        "llama",
        "apply_rotary_pos_emb",
        lambda: (*pair(B, -1, S, D), *angles(1, S, width=4, repeat="halves")),
        {},
    ),
    "gpt_oss": ("gpt_oss", "apply_rotary_pos_emb", lambda: (*pair(B, -1, S, D), *angles(B, S, width=4)), {}),
}


def rotary_case(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """``(function, arguments, keyword arguments)``; skips what this version of transformers does not have."""
    where, function_name, make, kwargs = CASES[name]
    try:
        function = getattr(modelling(where), function_name)
    except (ImportError, AttributeError):
        pytest.skip(f"this transformers has no {where}.{function_name}")
    torch.manual_seed(0)
    return function, make(), kwargs


def states(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Fresh arguments, the tensors to rotate in ``dtype`` and asking for gradients."""
    n = 1 if len(args) == 3 and not args[-1].is_complex() else 2
    turned = [x.detach().to(dtype).requires_grad_() for x in args[:n]]
    return (*turned, *args[n:]), turned


def outcome(function: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype, **kwargs: Any) -> list[Tensor]:
    given, turned = states(args, dtype)
    out = function(*given, **kwargs)
    out = [out] if isinstance(out, Tensor) else list(out)
    seeds = [torch.linspace(-1, 1, o.numel()).view(o.shape).to(o) for o in out]
    return [*out, *torch.autograd.grad(out, turned, seeds)]


def assert_alike(ours: Callable[..., Any], plain: Callable[..., Any], args: tuple[Any, ...], **kwargs: Any) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        found = outcome(ours, args, dtype, **kwargs)
        expected = outcome(plain, args, dtype, **kwargs)
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class NeighboursRotary(nn.Module):
    """As in torchtune: ``(B, S, heads, D)``, the cache holds cosine and sine side by side."""

    def __init__(self, dim: int = D, length: int = 16) -> None:
        super().__init__()
        self.dim = dim
        theta = 1.0 / (100 ** (torch.arange(0, dim, 2) / dim))
        turns = torch.outer(torch.arange(length), theta)
        self.register_buffer("cache", torch.stack((turns.cos(), turns.sin()), -1), persistent=False)

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        cache = self.cache[: x.size(1)] if input_pos is None else self.cache[input_pos]
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = cache.view(-1, x.size(1), 1, x.size(3) // 2, 2).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(3).type_as(x)
