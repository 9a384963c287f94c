"""Which submodules are text backbones, and which of those have padding that can be removed."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn as nn

from lightning_liger.configs import config_value
from lightning_liger.padding.interface import uses_attention_interface


def find_backbones(module: nn.Module) -> tuple[list[nn.Module], dict[nn.Module, str]]:
    """The innermost transformers models of ``module`` that embed tokens; those that must stay padded with the reason.

    A vision tower, a projector and a language model are all ``PreTrainedModel``; only those whose forward takes
    ``input_ids`` and an ``attention_mask`` hold text.
    """
    if "PreTrainedModel" not in {k.__name__ for m in module.modules() for k in type(m).__mro__}:
        return [], {}
    from transformers import PreTrainedModel

    inside_encoder_decoder: set[nn.Module] = set()
    for model in module.modules():
        if isinstance(model, PreTrainedModel) and getattr(model.config, "is_encoder_decoder", False):
            inside_encoder_decoder.update(model.modules())
    found: list[nn.Module] = []
    refused: dict[nn.Module, str] = {}
    for model in module.modules():
        if not isinstance(model, PreTrainedModel) or not _takes_tokens(model) or not _embeds_tokens(model):
            continue
        if any(m is not model and isinstance(m, PreTrainedModel) and _has_layers(m) for m in model.modules()):
            continue  # the layers belong to an inner model
        name = type(model).__name__
        if model in inside_encoder_decoder:
            refused[model] = f"{name}: encoder-decoder models keep their padding"
        elif "labels" in inspect.signature(type(model).forward).parameters:
            refused[model] = f"{name}: the model has no backbone apart from its head"
        elif not any(uses_attention_interface(m) for m in model.modules()):
            refused[model] = f"{name}: its attention is not looked up in the transformers interface"
        else:
            found.append(model)
    return found, refused


def attention_layers(backbone: nn.Module) -> list[nn.Module]:
    return [m for m in backbone.modules() if uses_attention_interface(m)]


def attention_dropout(backbone: Any) -> frozenset[str]:
    """What the configuration asks of attention in training, in the words of ``Features.asked``."""
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    given = (config_value(backbone.config, name) for name in names)
    return frozenset({"attention dropout"} if any(isinstance(p, float) and p > 0 for p in given) else ())


def head_size(backbone: Any) -> int | None:
    """Of queries and keys, as far as the configuration says it."""
    config = backbone.config
    size, width, heads = (config_value(config, n) for n in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(size, int):
        return size
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _has_layers(model: nn.Module) -> bool:
    return _takes_tokens(model) and any(isinstance(m, nn.ModuleList) for m in model.modules())


def _takes_tokens(model: nn.Module) -> bool:
    names = inspect.signature(type(model).forward).parameters
    return ("input_ids" in names or "inputs_embeds" in names) and "attention_mask" in names


def _embeds_tokens(model: Any) -> bool:
    try:
        embeddings = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return False
    # adapters wrap the table, and keep it inside
    return isinstance(embeddings, nn.Module) and any(isinstance(m, nn.Embedding) for m in embeddings.modules())
