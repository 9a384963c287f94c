"""What the probe found out about one architecture."""

from __future__ import annotations

from dataclasses import dataclass

POSITIONS = ("columns", "restart", "restart_after_pad")


@dataclass(frozen=True)
class Verdict:
    """Whether and how padding can be removed.

    Attributes:
        positions: which position ids the padded run gives a token: its column, counted from its row's first token, or
            that plus ``pad_token_id + 1``. None when the padding must stay.
        reason: why it must stay.
        causal: real tokens are not changed by what follows them, mask or no mask.
        cache: name in the output and class of the KV cache that a call with ``use_cache`` returns.
        cache_problem: why that could not be found out; then calls with ``use_cache`` run padded.
        asks: what attention layers need beyond plain attention, as ``Features.asked`` says it.
    """

    positions: str | None
    reason: str = ""
    causal: bool = False
    cache: tuple[str, type] | None = None
    cache_problem: str = ""
    asks: frozenset[str] = frozenset()
