"""Tiny models of ten architectures, and small helpers for kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import transformers
from helpers import PAD, VOCAB

from lightning_liger import Accelerated, accelerate
from lightning_liger.kernels import KernelBinding
from lightning_liger.patching import bindings_of

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3", "granite", "olmo2", "mixtral")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    # multipliers as in the released models, so that a dropped one shows
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
}


def tiny(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A model with the same weights for the same arguments, norms not at their initial ones, in training mode."""
    sizes = {**_SIZES, **_OWN.get(kind, {}), **changes}
    if kind == "phi3":
        sizes.pop("head_dim")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        for name, p in model.named_parameters():
            if "norm" in name:  # a weight of exactly 1 or 0 hides the difference between w and w + 1
                p.data += 0.3 * torch.randn_like(p)
    return model.to(dtype)


def only_kernels(module: nn.Module, kernels: Any = True) -> Accelerated:
    """Kernels and nothing else."""
    from lightning_liger import Settings

    return accelerate(module, Settings(padding_free=False, fused_head=False, kernels=kernels))


def batch(rows: int = 2, length: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.detach().clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def step(model: Any, **changes: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one batch."""
    loss = model(**batch(), **changes).loss
    loss.backward()
    return float(loss), gradients(model)


def kernel_bindings(module: nn.Module) -> int:
    """On how many modules a kernel is bound."""
    return sum(any(isinstance(b, KernelBinding) for b in bindings_of(m)) for m in module.modules())
