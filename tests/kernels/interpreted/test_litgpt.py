"""litgpt's blocks: the classes of the package itself where it is installed, and look-alikes everywhere."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import relative_all
from models import gradients, only_kernels
from torch import Tensor


class RMSNorm(nn.Module):
    def __init__(self, size: int, dim: int = -1, eps: float = 1e-6, add_unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.dim, self.add_unit_offset = eps, dim, add_unit_offset

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=self.dim, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + self.eps)
        weight = (1 + self.weight) if self.add_unit_offset else self.weight
        return (x_normed * weight.float()).to(dtype=dtype)


class LLaMAMLP(nn.Module):
    def __init__(self, width: int, hidden: int, act: Any = F.silu) -> None:
        super().__init__()
        self.fc_1, self.fc_2, self.proj = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x_fc_1, x_fc_2 = self.fc_1(x), self.fc_2(x)
        return self.proj(self.act(x_fc_1) * x_fc_2)


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    assert relative_all(ours, plain) < 1e-5


class Block(nn.Module):
    def __init__(self, offset: bool, act: Any) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(16, add_unit_offset=offset), RMSNorm(16, add_unit_offset=offset)
        self.mlp = LLaMAMLP(16, 24, act)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm_2(self.mlp(self.norm_1(x)))


@pytest.mark.parametrize(("offset", "act", "op"), ((False, F.silu, "swiglu"), (True, F.gelu, "geglu")))
def test_look_alike_blocks(offset: bool, act: Any, op: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(offset, act) for _ in range(2)))
    plain = copy.deepcopy(model)
    handle = only_kernels(model)
    assert {k: o.applied for k, o in handle.report.kernels.ops.items()} == {"rms_norm": 4, op: 2}
    x = torch.randn(3, 16)
    (a, b) = (m(x) for m in (model, plain))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    a.square().sum().backward()
    b.square().sum().backward()
    assert_close(gradients(model), gradients(plain))


CONFIGS = {
    "pythia": {"expected": {"layer_norm": (2, 1), "rope": (1, 0)}, "name": "pythia-14m"},
    "llama": {"expected": {"rms_norm": (2, 1), "swiglu": (1, 0), "rope": (1, 0)}, "name": "tiny-llama-1.1b"},
    "gemma": {"expected": {"rms_norm": (2, 1), "geglu": (1, 0), "rope": (1, 0)}, "name": "Gemma-2b"},
}


@pytest.mark.skipif(importlib.util.find_spec("litgpt") is None, reason="litgpt is not installed")
@pytest.mark.parametrize("kind", CONFIGS)
def test_litgpt(kind: str) -> None:
    from litgpt.config import Config
    from litgpt.model import GPT

    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": 2 if kind == "llama" else 4}
    sizes |= {"padded_vocab_size": 97, "intermediate_size": 48, "block_size": 32, "head_size": 8}
    sizes["n_query_groups"] = 1 if kind == "gemma" else sizes["n_query_groups"]
    config = Config.from_name(CONFIGS[kind]["name"], **sizes)
    torch.manual_seed(0)
    model = GPT(config)
    for name, p in model.named_parameters():
        if "norm" in name or "ln_f" in name:
            p.data += 0.3 * torch.randn_like(p)
    plain = copy.deepcopy(model)
    handle = only_kernels(model)
    ids = torch.randint(0, 97, (2, 7))
    losses = []
    for m in (model, plain):
        loss = F.cross_entropy(m(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_close(gradients(model), gradients(plain))
    ops = handle.report.kernels.ops
    for op, (per_layer, outside) in CONFIGS[kind]["expected"].items():
        assert ops[op].applied == ops[op].found == 2 * per_layer + outside, ops
        assert ops[op].calls and not ops[op].original_calls, ops[op]
        assert ops[op].sources == {"structural": ops[op].applied}
