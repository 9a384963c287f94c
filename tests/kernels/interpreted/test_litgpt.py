"""litgpt's blocks: the classes of the package itself where it is installed, and look-alikes everywhere."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import VOCAB, Plain, Run, assert_same, fit, relative_all
from models import gradients, only_kernels
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback


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


CONFIGS: dict[str, dict[str, Any]] = {
    "pythia": {"expected": {"layer_norm": (2, 1), "rope": (1, 0)}, "name": "pythia-14m"},
    "llama": {"expected": {"rms_norm": (2, 1), "swiglu": (1, 0), "rope": (1, 0)}, "name": "tiny-llama-1.1b"},
    "gemma": {"expected": {"rms_norm": (2, 1), "geglu": (1, 0), "rope": (1, 0)}, "name": "Gemma-2b"},
    "llama with LoRA": {"expected": {"rms_norm": (2, 1), "swiglu": (1, 0), "rope": (1, 0)}, "name": "tiny-llama-1.1b"},
}


class Lit(Plain):
    """litgpt's own way: logits from token ids, the loss in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        return F.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def litgpt_model(kind: str) -> nn.Module:
    if kind.endswith("LoRA"):
        from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
    else:
        from litgpt.config import Config
        from litgpt.model import GPT

    groups = {"pythia": 4, "gemma": 1}.get(kind, 2)
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": groups, "head_size": 8}
    sizes |= {"padded_vocab_size": VOCAB, "intermediate_size": 48, "block_size": 32}
    if kind.endswith("LoRA"):
        sizes |= {"lora_r": 4, "lora_alpha": 8, "lora_mlp": True, "lora_head": True, "lora_query": True}
    torch.manual_seed(0)
    model = GPT(Config.from_name(CONFIGS[kind]["name"], **sizes))
    if kind.endswith("LoRA"):
        mark_only_lora_as_trainable(model)
    for name, p in model.named_parameters():
        if "norm" in name or "ln_f" in name or "lora_B" in name:
            p.data += 0.3 * torch.randn_like(p)
    return model


@pytest.mark.skipif(importlib.util.find_spec("litgpt") is None, reason="litgpt is not installed")
@pytest.mark.parametrize("kind", CONFIGS)
def test_litgpt_in_a_lightning_module(kind: str) -> None:
    def run(callback: LigerCallback | None) -> Run:
        ids = torch.randint(0, VOCAB, (4, 7), generator=torch.Generator().manual_seed(0))
        data = DataLoader([{"input_ids": row} for row in ids], batch_size=2)  # type: ignore[arg-type]
        return fit(Lit(litgpt_model(kind), lr=0.05), data, callback, max_steps=2)

    plain = run(None)
    ours = run(LigerCallback(kernels=True, padding_free=False, fused_head=False, verbose=False))
    assert_same(plain, ours, loss=1e-5, gradient=1e-5, parameter=1e-5)
    ops = ours.report["kernels"]["ops"]
    for op, (per_layer, outside) in CONFIGS[kind]["expected"].items():
        expected = 2 * per_layer + outside
        assert ops[op]["applied"] == ops[op]["found"] == ops[op]["called"] == expected, ops
        assert not ops[op]["original_calls"], ops[op]
        assert ops[op]["sources"] == {"structural": expected}
