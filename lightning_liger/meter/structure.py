"""The matrix products and attention layers of a model, read from its modules without running it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch.nn as nn

from lightning_liger.configs import config_value
from lightning_liger.meter.attention import attention_of, looks_causal
from lightning_liger.meter.flops import Attention, ModelCost, Product

_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "top_k",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
    "moe_topk",
    "num_experts_per_token",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_expert", "groups")
# Layers of these kinds are recurrences or convolutions, whose products no module shows.
_NO_PRODUCTS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "moe_mamba")
# Types whose attention is not what their layers look like: differential, hashed, over a prompt of the model's own, with
# keys of other layers; and one that loops without gradients. All other types of transformers agree with what they run.
_OTHERWISE = ("cpmant", "diffllama", "gemma3n_text", "hrm_text", "longformer", "mra", "prophetnet", "reformer")
# Weights that are left out may be this share of those that are counted.
NEGLIGIBLE = 0.01


@dataclass(frozen=True)
class Structure:
    """What was found in one model: items beside the modules they stand for."""

    products: tuple[tuple[nn.Module, Product], ...]
    attentions: tuple[tuple[nn.Module, Attention], ...]
    unknown: tuple[str, ...]

    @property
    def cost(self) -> ModelCost:
        return ModelCost(tuple(p for _, p in self.products), tuple(a for _, a in self.attentions), self.unknown)

    def without(self, modules: set[nn.Module]) -> Structure:
        """Without the products of ``modules``."""
        return replace(self, products=tuple((m, p) for m, p in self.products if m not in modules))


def read_structure(model: nn.Module, skip: frozenset[nn.Module] = frozenset()) -> Structure:
    """The products and attention layers of ``model``.

    Which inputs need a gradient is taken from the order in which modules were registered: a product's does where any
    parameter before it trains. That is exact for models that are trained in full, and counts a few products of the
    first adapted layer too many for LoRA; :mod:`lightning_liger.meter.observing` puts it right.

    Args:
        model: a backbone, or any module whose rows are tokens.
        skip: modules that are left out, with all that they hold.
    """
    products: list[tuple[nn.Module, Product]] = []
    attentions: list[tuple[nn.Module, Attention]] = []
    below = False  # something is trained below
    left_out: dict[str, int] = {}
    inside = {m for part in skip for m in part.modules()} | _inactive_adapters(model)
    config, causal = getattr(model, "config", None), looks_causal(model)
    for name, module in model.named_modules():
        if module in inside:
            continue
        found = attention_of(name, module, config, causal=causal, gradient=below)
        if found is not None:
            attentions.append((module, found))
        own = list(_products(name, module, config, below))
        products += [(module, p) for p in own]
        if not own and not isinstance(module, nn.Embedding):
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    left_out[f"{name}.{key}".strip(".")] = _entries(parameter)
        below = below or any(p.requires_grad for p in module.parameters(recurse=False))
    # an attention layer comes before what it holds, and its own projections are below its attention
    trained = {m: _trains(m) for m, _ in attentions}
    attentions = [(m, replace(a, gradient=a.gradient or trained[m])) for m, a in attentions]
    counted = sum(p.inputs * p.outputs for _, p in products)
    return Structure(tuple(products), tuple(attentions), tuple(_unknown(model, left_out, counted, bool(attentions))))


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _products(name: str, module: Any, config: Any, below: bool) -> Iterator[Product]:
    if isinstance(module, nn.MultiheadAttention):
        weights = (module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        for weight in (w for w in weights if w is not None):
            yield Product(f"{name}.in_proj", weight.shape[1], weight.shape[0], 1.0, weight.requires_grad, below)
    elif isinstance(module, nn.Linear):
        trained = module.weight.requires_grad
        share = _share_of_experts(name, config)
        sizes = module.in_features, module.out_features
        yield Product(name, *sizes, 1.0 if share is None else share, trained, below, routed=share is not None)
    elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of transformers: weight (in, out)
        yield Product(name, int(module.weight.shape[0]), int(module.nf), 1.0, module.weight.requires_grad, below)
    elif not isinstance(module, nn.modules.conv._ConvNd):
        experts = next((n for n in (getattr(module, e, None) for e in _EXPERTS) if isinstance(n, int)), 0)
        for key, weight in module.named_parameters(recurse=False):
            if not experts or weight.dim() not in (2, 3) or weight.shape[0] != experts:
                continue
            if weight.dim() == 3:  # (experts, out, in) or (experts, in, out)
                rows = float(_experts_per_token(module, config))
                inputs, outputs = int(weight.shape[2]), int(weight.shape[1])
            elif key == "weight":  # a router: (experts, in)
                rows, inputs, outputs = 1.0, int(weight.shape[1]), int(weight.shape[0])
            else:
                continue  # biases of experts
            trained, routed = weight.requires_grad, weight.dim() == 3
            yield Product(f"{name}.{key}", inputs, outputs, rows, trained, below, routed=routed)
            below = below or weight.requires_grad


def _experts_per_token(module: Any, config: Any) -> int:
    for owner in (module, config):
        for name in _EXPERTS_PER_TOKEN:
            value = config_value(owner, name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 1


def _share_of_experts(name: str, config: Any) -> float | None:
    """Rows per token of one of many experts in a list: ``top_k / experts``; None for any other linear layer."""
    parts = name.split(".")
    routed = any(a == "experts" and b.isdigit() for a, b in pairwise(parts))
    if not routed:
        return None
    experts = next((n for n in (config_value(config, e) for e in _EXPERTS) if isinstance(n, int) and n), 0)
    return _experts_per_token(None, config) / experts if experts else 1.0


def _inactive_adapters(model: nn.Module) -> set[nn.Module]:
    """Adapters of PEFT that are there and do not run."""
    idle: set[nn.Module] = set()
    for module in model.modules():
        active = getattr(module, "active_adapters", None)
        if not isinstance(getattr(module, "lora_A", None), nn.ModuleDict) or not isinstance(active, (list, tuple)):
            continue
        off = bool(getattr(module, "disable_adapters", False) or getattr(module, "merged", False))
        for table in (module.lora_A, module.lora_B):
            for key, adapter in table.items():  # type: ignore[union-attr, operator]
                if off or key not in active:
                    idle.update(adapter.modules())
    return idle


def _unknown(model: nn.Module, left_out: dict[str, int], counted: int, attends: bool) -> Iterator[str]:
    name = type(model).__name__
    config = getattr(model, "config", None)
    kinds = config_value(config, "layer_types")
    odd = sorted({k for k in kinds or () if k in _NO_PRODUCTS})
    if odd:
        yield f"{name} has layers of the kind {', '.join(odd)}, whose products are not known"
    if getattr(config, "model_type", "") in _OTHERWISE:
        yield f"the attention of {name} is not counted right"
    if isinstance(config_value(config, "index_topk"), int):
        yield f"{name} picks the tokens that it attends to, and how many is not known"
    if getattr(config, "is_encoder_decoder", False):
        yield f"{name}: attention between an encoder and a decoder is not counted"
    if not attends:
        yield f"{name} has no attention layer that is recognised"
    largest = max(left_out, key=lambda key: left_out[key], default="")
    if sum(left_out.values()) > NEGLIGIBLE * counted:
        yield f"{name} multiplies with weights that no linear layer holds ({largest})"


def _entries(parameter: Any) -> int:
    return math.prod(getattr(parameter, "ds_shape", parameter.shape))
