"""Token-budget batches from a stream, whose samples nobody can count beforehand.

Each worker looks a bounded number of samples ahead and fills a batch from them: the one that has waited longest, then
the longest that still fit. Ranks agree before every step that all of them have a batch; when one has none, the epoch
ends for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_liger.data.counting import count_tokens

_LOOK_AHEAD = 512


class PackedStream(IterableDataset[Any]):
    """Collated batches of at most ``budget`` tokens from the samples of ``stream``.

    Args:
        stream: the user's dataset.
        collate: from samples to a batch.
        budget: tokens per batch.
        length_fn: from a sample to its tokens; by default the sample is collated alone and counted.
        overlong: ``"error"``, ``"skip"``, or ``"own_batch"``, for samples of more than ``budget`` tokens.
        look_ahead: samples that are held while the next batch is chosen.

    Raises:
        ValueError: while iterating, a sample over the budget under ``overlong="error"``.
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        collate: Callable[[list[Any]], Any],
        budget: int,
        length_fn: Callable[[Any], int] | None,
        overlong: str,
        look_ahead: int = _LOOK_AHEAD,
    ) -> None:
        self.stream = stream
        self.collate = collate
        self.budget = budget
        self.length_fn = length_fn
        self.overlong = overlong
        self.look_ahead = look_ahead

    def __iter__(self) -> Iterator[Any]:
        held: list[tuple[int, Any]] = []
        tokens = 0
        for sample in self.stream:
            length = count_tokens(sample, self.collate, self.length_fn)
            if length > self.budget and self.overlong == "error":
                raise ValueError(
                    f"A sample of the stream has {length:,} tokens, more than max_tokens_per_batch={self.budget:,}. "
                    "Raise the budget, shorten the samples, or choose overlong='truncate', 'skip' or 'own_batch'."
                )
            if length > self.budget and self.overlong == "skip":
                continue
            held.append((length, sample))
            tokens += length
            if len(held) >= self.look_ahead or tokens >= 8 * self.budget:
                tokens -= yield from self._batch(held)
        while held:
            yield from self._batch(held)

    def _batch(self, held: list[tuple[int, Any]]) -> Generator[Any, None, int]:
        """One batch out of ``held``; returns its tokens."""
        chosen = [0]
        room = self.budget - held[0][0]
        for at in sorted(range(1, len(held)), key=lambda i: -held[i][0]):
            if held[at][0] <= room:
                chosen.append(at)
                room -= held[at][0]
        chosen.sort()
        batch = [held[at] for at in chosen]
        for at in reversed(chosen):
            del held[at]
        yield self.collate([sample for _, sample in batch])
        return sum(length for length, _ in batch)


class AgreeingLoader:
    """Batches of ``loader`` for as long as every rank has one."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._group: Any = None

    def __iter__(self) -> Iterator[Any]:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            yield from self.loader
            return
        if self._group is None:
            # over the hosts: ranks wait for each other's loaders, not for their devices
            self._group = dist.new_group(backend="gloo")
        batches = iter(self.loader)
        while True:
            batch = next(batches, _DRY)
            everyone = torch.tensor(batch is not _DRY, dtype=torch.int32)
            dist.all_reduce(everyone, dist.ReduceOp.MIN, group=self._group)
            if not everyone:
                return
            yield batch


_DRY = object()


def packed_stream(
    loader: DataLoader[Any], budget: int, length_fn: Callable[[Any], int] | None, overlong: str
) -> AgreeingLoader:
    """``loader`` over an ``IterableDataset`` with batches by tokens; its workers and their set-up stay."""
    made = copy.copy(loader)
    stream = PackedStream(loader.dataset, loader.collate_fn, budget, length_fn, overlong)  # type: ignore[arg-type]
    for name, value in (("dataset", stream), ("batch_size", None), ("batch_sampler", None), ("drop_last", False)):
        object.__setattr__(made, name, value)  # DataLoader lets nobody but its constructor do so
    made.collate_fn = _as_it_is
    return AgreeingLoader(made)


def _as_it_is(batch: Any) -> Any:
    return batch
