"""What a batch holds: real tokens, positions, and a sum that tells two batches apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_liger.data.counting import NoLength, tokens_of


@dataclass(frozen=True)
class Contents:
    """One batch.

    Attributes:
        tokens: without padding; None if the batch holds none that can be counted.
        lengths: tokens of each row, ``()`` where they cannot be counted.
        positions: with padding.
        labels: rows that a loss is over; None where no tensor is named so.
        parts: tensors of tokens; 2 for pairs of answers.
        checksum: equal for equal batches.
    """

    tokens: int | None
    lengths: tuple[int, ...]
    positions: int
    labels: int | None
    parts: int
    checksum: int


def whole_numbers(batch: Any) -> Any:
    """``batch`` with its tensors of whole numbers only: what tells tokens from padding, and costs little to keep."""
    if isinstance(batch, Tensor):
        return None if batch.is_floating_point() or batch.is_complex() else batch.detach()
    if isinstance(batch, Mapping):
        return {str(k): whole_numbers(v) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [whole_numbers(v) for v in batch]
    fields = getattr(batch, "__dict__", None)
    return {k: whole_numbers(v) for k, v in fields.items()} if isinstance(fields, dict) else None


def contents(batch: Any) -> Contents:
    """What is in ``batch``, as :func:`whole_numbers` left it. Reads values: not while something is timed."""
    batch = _on_cpu(batch)
    parts = _named(batch)
    tables = [v for v in parts.values() if v.dim() == 2]
    ids = [v for k, v in parts.items() if k.endswith("input_ids") and v.dim() == 2]
    positions = sum(v.numel() for v in ids) or max((v.numel() for v in tables), default=0)
    lengths: tuple[int, ...] = ()
    if tables:
        rows = len(max(tables, key=Tensor.numel))
        try:
            lengths = tuple(tokens_of(_row(batch, i, rows)) for i in range(rows))
        except NoLength:
            lengths = ()
    labels = [v for k, v in parts.items() if k.endswith("labels") and v.dim() == 2]
    return Contents(
        tokens=sum(lengths) if lengths else None,
        lengths=lengths,
        positions=positions,
        labels=sum(int((v[:, 1:] != -100).sum()) for v in labels) if labels else None,
        parts=max(len(ids), 1),
        checksum=sum(map(_checksum, parts.values())),
    )


def _checksum(values: Tensor) -> int:
    flat = values.flatten().to(torch.int64)
    return int((flat * torch.arange(1, len(flat) + 1)).sum())


def _on_cpu(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.cpu()
    if isinstance(batch, dict):
        return {k: _on_cpu(v) for k, v in batch.items()}
    return [_on_cpu(v) for v in batch] if isinstance(batch, list) else batch


def _named(batch: Any, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(batch, Tensor):
        return {prefix: batch}
    items = batch.items() if isinstance(batch, dict) else enumerate(batch) if isinstance(batch, list) else ()
    return {name: v for key, value in items for name, v in _named(value, f"{prefix}.{key}").items()}


def _row(batch: Any, index: int, rows: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[index : index + 1] if batch.dim() and len(batch) == rows else batch
    if isinstance(batch, dict):
        return {k: _row(v, index, rows) for k, v in batch.items()}
    return [_row(v, index, rows) for v in batch] if isinstance(batch, list) else batch
