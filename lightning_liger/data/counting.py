"""Tokens of one sample, counted in the batch that the user's collate function makes of it alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

LENGTH_COLUMNS = ("length", "lengths", "num_tokens", "n_tokens", "token_count")
_TOKENS = ("input_ids", "ids", "tokens", "idx", "x", "inputs")


class NoLength(ValueError):
    """The number of tokens of a sample cannot be told."""


def count_tokens(sample: Any, collate: Callable[[list[Any]], Any], length_fn: Callable[[Any], int] | None) -> int:
    """Tokens of one dataset sample.

    Raises:
        NoLength: without ``length_fn``, if its collated batch holds none.
    """
    return int(length_fn(sample)) if length_fn is not None else tokens_of(collate([sample]))


def tokens_of(batch: Any) -> int:
    """Tokens of a collated batch of one sample, without its padding.

    In this order: what is named ``...attention_mask``, summed over several, as pairs of answers have; another tensor of
    zeros and ones in the shape of the tokens, if all that it leaves out is one and the same token (a loss mask leaves
    out a prompt); the tokens without the constant tail of which one is kept, as :mod:`lightning_liger.padding.sources`
    reads calls without a mask.

    Raises:
        NoLength: it holds no ``(1, L)`` tensor of whole numbers.
    """
    named = {str(k): v for k, v in _named(batch).items()}
    masks = [v for k, v in named.items() if _ends(k, "attention_mask") and _is_row(v)]
    if masks:
        return sum(int((mask != 0).sum()) for mask in masks)
    parts = [v for k, v in named.items() if _ends(k, "input_ids") and _is_row(v)]
    if len(parts) > 1:
        return sum(_without_tail(ids) for ids in parts)
    rows = [v for v in _flat(batch) if _is_row(v)]
    ids = next((named[k] for k in _TOKENS if _is_row(named.get(k))), None)
    if ids is None and rows:
        # of tokens, masks and labels in one shape, tokens come first in every batch that people write
        ids = max(rows, key=lambda row: row.numel())
    if ids is None:
        what = sorted(named) if named else type(batch).__name__
        raise NoLength(
            "max_tokens_per_batch needs the number of tokens of each sample, and the collated batch holds none that can "
            f"be counted (found: {what}). Give LigerCallback(length_fn=...), a function from a dataset sample to its "
            f"number of tokens, or a dataset column named one of {', '.join(LENGTH_COLUMNS)}."
        )
    masked = [int((row != 0).sum()) for row in rows if row is not ids and _leaves_out_padding(row, ids)]
    return max(masked) if masked else _without_tail(ids)


def _ends(name: str, end: str) -> bool:
    # Longformer's second mask marks some of the tokens that the first one counts
    return name.endswith(end) and not name.startswith("global")


def _leaves_out_padding(mask: Tensor, ids: Tensor) -> bool:
    if mask.shape != ids.shape or not mask.any() or not ((mask == 0) | (mask == 1)).all():
        return False
    left_out = ids[mask == 0]
    return bool((left_out == left_out[:1]).all())


def _without_tail(ids: Tensor) -> int:
    row = ids[0]
    tail = int((row.flip(0) == row[-1:]).to(torch.int64).cumprod(0).sum())
    return len(row) - max(tail - 1, 0)


def _is_row(value: Any) -> bool:
    """A ``(1, L)`` tensor of whole numbers, or of booleans."""
    return isinstance(value, Tensor) and value.dim() == 2 and len(value) == 1 and not value.is_floating_point()


def _named(batch: Any) -> Mapping[Any, Any]:
    return batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", {})


def _flat(batch: Any) -> list[Any]:
    if isinstance(batch, (list, tuple)):
        return [v for item in batch for v in _flat(item)]
    if isinstance(batch, Tensor) or not _named(batch):
        return [batch]
    return [v for item in _named(batch).values() for v in _flat(item)]
