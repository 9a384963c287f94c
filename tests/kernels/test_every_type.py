"""Every architecture that Liger knows, tiny: what is bound is called, and computes what the plain model computes.

With the kernels' formulas in PyTorch, in the test's own process; the kernels themselves run in ``interpreted/``.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lightning_liger.kernels import liger
from lightning_liger.kernels.apply import Kernels
from lightning_liger.kernels.reference import instead_of_triton
from lightning_liger.kernels.report import KernelReport
from lightning_liger.kernels.table import Maker
from lightning_liger.padding.tiny import tiny_config
from lightning_liger.patching import Switch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="Liger is not installed")

TYPES = [t for t in liger.model_types() if t != "pixtral"]  # a vision tower alone: nothing to do with text
# Projections of images, cross-attention layers of a text-only batch, and layers that look beyond a cache, do not run at all.
IDLE = {
    "muse_glimmer": {"MuseGlimmerRMSNorm"},
    "mllama": {"MllamaTextMLP", "MllamaTextRMSNorm"},
    "mllama_text_model": {"MllamaTextMLP", "MllamaTextRMSNorm"},
    "deepseek_v4": {"DeepseekV4HCACompressor", "DeepseekV4RMSNorm"},
}
# Layers that see everything have no positions.
WITHOUT_POSITIONS = {"exaone4": "Exaone4Attention", "muse_glimmer": "MuseGlimmerTextAttention"}


def complete(config: Any) -> Any:
    """What shrinking a configuration of these types leaves out."""
    for name in getattr(config, "sub_configs", None) or {}:
        if (inner := getattr(config, name, None)) is not None:
            complete(inner)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and any(t in config.model_type for t in ("qwen2_vl", "qwen2_5_vl", "glm4v")):
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    if getattr(config, "n_routed_experts", None) and config.num_experts_per_tok is None:
        config.num_experts_per_tok = 2
    if config.model_type == "falcon_h1":
        config.mamba_d_ssm = config.mamba_n_heads * config.mamba_d_head
    return config


def build(model_type: str) -> Any:
    maker = Maker(model_type)
    torch.manual_seed(0)
    model = maker.build(complete(tiny_config(maker.config))).float().train()
    for name, p in model.named_parameters():
        # a weight of exactly 1 or 0 hides much
        p.data += (0.1 if "norm" in name else 0.02) * torch.randn_like(p)
    return model


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    device = next(model.parameters()).device
    ids = torch.randint(3, 30, (2, 8), generator=torch.Generator().manual_seed(0)).to(device)
    out = model(input_ids=ids)
    out = out.logits if getattr(out, "logits", None) is not None else out[0]
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (out * seed).mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out.detach(), grads


def in_text(name: str) -> bool:
    return not any(part in name for part in ("vision", "visual", "audio", "projector", "connector"))


@pytest.mark.parametrize("model_type", TYPES)
def test_what_is_bound_is_called_and_computes_the_same(model_type: str) -> None:
    model = build(model_type)
    names = {m: n for n, m in model.named_modules()}
    plain, expected = step(model)
    with instead_of_triton():
        report = KernelReport()
        bindings = Kernels(True, report, Switch(True)).bindings(model)
        for binding in bindings:
            binding.bind()
        ours, grads = step(model)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    whole = sum(float(g.double().norm()) ** 2 for g in expected.values()) ** 0.5
    assert whole > 0
    assert max(float((grads[n] - g).double().norm()) for n, g in expected.items()) < 1e-5 * whole
    idle = {type(b.module).__name__ for b in bindings if not b.has_run and in_text(names[b.module])}
    idle -= {WITHOUT_POSITIONS.get(model_type)} | IDLE.get(model_type, set())
    assert not idle
    assert not any(op.original_calls for op in report.ops.values()), report.reasons()
