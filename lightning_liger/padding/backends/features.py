"""What one attention layer asks for in one call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# What attention functions of transformers understand about one call and what does not change its result.
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}
HARMLESS |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "return_dict", "num_items_in_batch"}
HARMLESS |= {"deterministic", "output_router_logits", "position_embeddings", "cache", "past_key_values", "token_type"}
_UNDERSTOOD = HARMLESS | {"dropout", "scaling", "is_causal", "sliding_window", "softcap", "s_aux"}
_FOREIGN = _UNDERSTOOD - {"sliding_window"}  # where it is not one number
_NUMBERS = ("sliding_window", "softcap", "scaling", "dropout")
OTHER_VALUES = "values of another head size than keys"


@dataclass(frozen=True)
class Features:
    """One layer's attention, without its documents.

    Attributes:
        device, dtype: of query, key and value; the device type only.
        capability: compute capability of the CUDA device, ``(0, 0)`` elsewhere.
        head_size, value_size: of query and key, and of value.
        heads, kv_heads: query heads, and key/value heads that they share.
        causal: no token attends to what follows it.
        window: how many tokens are in reach, the token itself included; on either side where it is not causal.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sinks: one learnt score per head takes part in the softmax without a value.
        dropout: probability with which attention weights are dropped.
        scale: of the scores; None is ``head_size ** -0.5``.
        other: arguments whose meaning only the model's own attention function knows.
    """

    device: str
    dtype: torch.dtype
    head_size: int
    value_size: int
    heads: int
    kv_heads: int
    capability: tuple[int, int] = (0, 0)
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    scale: float | None = None
    other: tuple[str, ...] = ()

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, causal: bool, arguments: dict[str, Any]) -> Features:
        """Read ``(1, heads, T, size)`` tensors and the keywords of an attention function of transformers."""
        device = query.device
        given = {k: v for k, v in arguments.items() if v is not None}
        window = given.get("sliding_window")
        return Features(
            device=device.type,
            dtype=query.dtype,
            head_size=query.shape[-1],
            value_size=value.shape[-1],
            heads=query.shape[1],
            kv_heads=key.shape[1],
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
            causal=causal,
            window=window if isinstance(window, int) else None,
            softcap=float(given["softcap"]) if given.get("softcap") else None,
            sinks="s_aux" in given,
            dropout=float(given.get("dropout", 0.0)),
            scale=float(given["scaling"]) if "scaling" in given else None,
            other=tuple(
                sorted(given.keys() - (_UNDERSTOOD if window is None or isinstance(window, int) else _FOREIGN))
            ),
        )

    @staticmethod
    def signature(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, arguments: dict[str, Any]
    ) -> tuple[object, ...]:
        """Equal for calls of equal :meth:`of`, and quicker: layers of one model ask for the same again and again."""
        other = tuple(k for k, v in arguments.items() if v is not None and k not in _UNDERSTOOD)
        numbers = tuple(str(v) if isinstance(v := arguments.get(n), (list, tuple)) else v for n in _NUMBERS)
        shapes = (query.shape, key.shape, value.shape[-1], query.dtype)
        return (*shapes, causal, arguments.get("s_aux") is None, *numbers, other)

    def within(self, longest: int) -> Features:
        """The same without a window that no document of up to ``longest`` tokens is long enough to notice."""
        return replace(self, window=None) if self.window is not None and self.window >= longest else self

    @property
    def window_sides(self) -> tuple[int, int]:
        """Tokens to the left and to the right, as flash attention counts them; -1 is all."""
        left = -1 if self.window is None else self.window - 1
        return left, 0 if self.causal else left

    def asked(self) -> frozenset[str]:
        """What a backend must be able to do beyond plain attention, in words."""
        wants = {
            "sliding windows": self.window is not None,
            "soft-capped scores": self.softcap is not None,
            "attention sinks": self.sinks,
            "attention dropout": self.dropout > 0,
            "attention in both directions": not self.causal,
            OTHER_VALUES: self.head_size != self.value_size,
            **{f"the argument {name!r}": True for name in self.other},
        }
        return frozenset(name for name, wanted in wants.items() if wanted)
