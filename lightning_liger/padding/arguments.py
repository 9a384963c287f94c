"""What a backbone is called with, and which of it says that the call must run as it is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_liger.configs import config_value
from lightning_liger.padding.sources import Unsuitable

# Arguments of a backbone whose meaning is known, besides the token ones handled one by one by its boundary.
TOKEN_ARGUMENTS = ("input_ids", "inputs_embeds", "token_type_ids", "per_layer_inputs")
CACHES = ("past_key_values", "cache", "past_key_value")
_FLAGS = ("use_cache", "output_attentions", "output_hidden_states", "return_dict")
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def first(call: dict[str, Any], *names: str) -> Any:
    """The first of these arguments that is given, or None."""
    return next((call[n] for n in names if call.get(n) is not None), None)


def check_arguments(call: dict[str, Any], shape: tuple[int, int], names: tuple[str, ...]) -> None:
    """
    Args:
        shape: ``(B, S)`` of the call. names: of the parameters that the backbone's forward names.

    Raises:
        Unsuitable: an argument whose meaning without padding is not known.
    """
    known = {*TOKEN_ARGUMENTS, *_FLAGS, *CACHES, *_PACKED, "attention_mask", "position_ids"}
    known |= {"output_router_logits"} | ({"labels"} - set(names))
    for name, value in call.items():
        if name in known or value is None:
            continue
        if isinstance(value, Tensor) and value.dim() < 2:
            continue  # counts such as num_items_in_batch
        if isinstance(value, (Tensor, list, tuple, dict)):
            raise Unsuitable(f"argument {name!r} is not understood")
    positions = call.get("position_ids")
    if positions is not None and (
        not isinstance(positions, Tensor) or positions.shape[-1] != shape[1] or positions.dim() not in (2, 3)
    ):
        raise Unsuitable("position_ids of an unknown shape")


def rotates_by_length(config: Any) -> bool:
    """Whether rotary frequencies depend on how long the batch is: ``dynamic`` and ``longrope`` scaling."""
    rope = config_value(config, "rope_parameters") or config_value(config, "rope_scaling")
    if not isinstance(rope, dict):
        return False
    kinds = [r.get("rope_type", r.get("type")) for r in (rope, *rope.values()) if isinstance(r, dict)]
    return any(kind in ("dynamic", "longrope") for kind in kinds)
