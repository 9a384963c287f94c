"""One message for a batch that did not fit into memory: which it was, and what to try."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


class BatchTooLarge(torch.OutOfMemoryError):
    """CUDA ran out of memory in a batch by tokens; the cause is PyTorch's own error."""


def explained(step: Callable[..., _Result], describe: Callable[[], str]) -> Callable[..., _Result]:
    """``step``, whose out-of-memory errors say what ``describe`` does."""

    @functools.wraps(step)
    def run(*args: object, **kwargs: object) -> _Result:
        try:
            return step(*args, **kwargs)
        except BatchTooLarge:
            raise
        except torch.OutOfMemoryError as error:
            raise BatchTooLarge(f"{describe()}\n{error}") from error

    return run


def advice(batches: list[list[int]], budget: int, longest: int) -> str:
    """What to say about ``batches`` of samples with so many tokens, one per loader, under ``budget``.

    Args:
        longest: tokens of the longest sample of the dataset, below which a budget cannot go.
    """
    held = " and ".join(f"{len(b):,} samples with {sum(b):,} tokens (longest {max(b):,})" for b in batches if b)
    lower = budget * 3 // 4
    lower = lower // 256 * 256 if lower >= 1024 else lower
    what = f"Out of memory in a batch of {held or 'a stream'}, under max_tokens_per_batch={budget:,}."
    if lower >= max(longest, 1):
        return f"{what} Try max_tokens_per_batch={lower}."
    if budget > longest:
        return f"{what} Try max_tokens_per_batch={longest}, the longest sample, or cut long samples with overlong='truncate'."
    return f"{what} The longest sample has {longest:,} tokens: cut long samples with a lower budget and overlong='truncate'."
