"""What attention costs beside the rest of a model, for balancing batches."""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from lightning_liger.configs import config_value
from lightning_liger.data.planner import Cost


def cost_of(module: nn.Module) -> Cost:
    """The cost of the largest decoder or encoder stack in ``module``; tokens alone where none says its sizes."""
    best = Cost()
    most = 0
    for model in module.modules():
        sizes = _sizes(getattr(model, "config", None))
        if sizes is None:
            continue
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        parameters = sum(p.numel() for p in model.parameters() if id(p) not in tables)
        if parameters > most:
            layers, width = sizes
            most, best = parameters, Cost(layers * width / parameters)
    return best


def _sizes(config: Any) -> tuple[int, int] | None:
    """Layers, and the width of what is attended."""
    found = [config_value(config, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
    layers, heads, width = (size if isinstance(size, int) else 0 for size in found)
    head = config_value(config, "head_dim")
    attended = heads * head if isinstance(head, int) else width
    return (layers, attended) if layers and attended else None
