"""Token-budget batches from a stream, whose samples nobody can count beforehand.

Each worker looks a bounded number of samples ahead and fills a batch from them: the one that has waited longest, then
the longest that still fit. Ranks agree before every step that all of them have a batch; when one has none, the epoch
ends for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
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
        self._held: list[_Held] = []

    def __iter__(self) -> Iterator[Any]:
        held = self._held = []
        tokens = 0
        for number, sample in self._samples():
            length = count_tokens(sample, self.collate, self.length_fn)
            if length > self.budget and self.overlong == "error":
                raise ValueError(
                    f"A sample of the stream has {length:,} tokens, more than max_tokens_per_batch={self.budget:,}. "
                    "Raise the budget, shorten the samples, or choose overlong='truncate', 'skip' or 'own_batch'."
                )
            if length > self.budget and self.overlong == "skip":
                continue
            held.append(_Held(number, length, sample))
            tokens += length
            if self._is_new(number) and (len(held) >= self.look_ahead or tokens >= 8 * self.budget):
                tokens -= yield from self._batch(held)
        while held:
            yield from self._batch(held)

    def _samples(self) -> Iterator[tuple[int, Any]]:
        """Numbered from the beginning of the epoch."""
        return enumerate(self.stream)

    def _is_new(self, number: int) -> bool:
        """Whether this sample is read for the first time, and batches were not made of it before."""
        return True

    def _batch(self, held: list[_Held]) -> Generator[Any, None, int]:
        """One batch out of ``held``; returns its tokens."""
        chosen = [0]
        room = self.budget - held[0].length
        for at in sorted(range(1, len(held)), key=lambda i: -held[i].length):
            if held[at].length <= room:
                chosen.append(at)
                room -= held[at].length
        chosen.sort()
        batch = [held[at] for at in chosen]
        for at in reversed(chosen):
            del held[at]
        yield self.collate([each.sample for each in batch])
        return sum(each.length for each in batch)


@dataclass(frozen=True)
class _Held:
    number: int
    length: int
    sample: Any


class StatefulPackedStream(PackedStream):
    """For streams that can say where they are, as torchdata's loader asks them to.

    Samples that wait for a batch are read again after a resume, from a place of the stream's own before them: a
    checkpoint that is loaded with ``weights_only=True`` can hold numbers, and no samples.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._resumed = False
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._places: list[tuple[int, Any]] = []  # of the stream, before the sample of that number
        self._read = 0
        self._read_before = 0
        self._waited: set[int] = set()

    def _samples(self) -> Iterator[tuple[int, Any]]:
        stream: Any = self.stream
        number = self._places[0][0] if self._places else 0
        samples = iter(stream)
        while True:
            if number % _PLACES_EVERY == 0 and number >= self._read_before:
                self._places.append((number, stream.state_dict()))
                self._forget()
            sample = next(samples, _DRY)
            if sample is _DRY:
                break
            self._read = max(self._read, number + 1)
            if self._is_new(number) or number in self._waited:
                yield number, sample
            number += 1

    def _is_new(self, number: int) -> bool:
        return number >= self._read_before

    def _forget(self) -> None:
        """Places that no sample needs which still waits."""
        oldest = self._held[0].number if self._held else self._read
        while len(self._places) > 1 and self._places[1][0] <= oldest:
            del self._places[0]

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self._begin_epoch()  # the last one may have been cut short
        self._resumed = False
        yield from super().__iter__()
        self._begin_epoch()

    def state_dict(self) -> dict[str, Any]:
        self._forget()
        number, place = self._places[0] if self._places else (0, None)
        waiting = [each.number for each in self._held]
        return {"number": number, "place": place, "read": self._read, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        stream: Any = self.stream
        self._begin_epoch()
        if state["place"] is not None:
            stream.load_state_dict(state["place"])
            self._places = [(state["number"], state["place"])]
        self._read = self._read_before = state["read"]
        self._waited = set(state["waiting"])
        self._resumed = True


class AgreeingLoader:
    """Batches of ``loader`` for as long as every rank has one.

    Args:
        ranks: with data of their own, of which this is number ``rank``.
    """

    def __init__(self, loader: DataLoader[Any], ranks: int = 1, rank: int = 0) -> None:
        self.loader = loader
        self._ranks, self._rank = ranks, rank
        self._group: Any = None

    def __iter__(self) -> Iterator[Any]:
        if not _several_ranks():
            yield from self.loader
            return
        batches = iter(self.loader)
        while True:
            batch = next(batches, _DRY)
            everyone = torch.tensor(batch is not _DRY, dtype=torch.int32)
            dist.all_reduce(everyone, dist.ReduceOp.MIN, group=self._gloo())
            if not everyone:
                return
            yield batch

    def end_batch(self, *, last: bool) -> None:
        """A batch has been trained on, the ``last`` of the epoch or not."""

    def _gloo(self) -> Any:
        if self._group is None:
            # over the hosts: ranks wait for each other's loaders, not for their devices
            self._group = dist.new_group(backend="gloo")
        return self._group


class StatefulAgreeingLoader(AgreeingLoader):
    """For loaders that can say where they are: what has been trained on counts, not what has been fetched ahead."""

    def __init__(self, loader: DataLoader[Any], ranks: int = 1, rank: int = 0) -> None:
        super().__init__(loader, ranks, rank)
        self._trained = 0
        self._over = False
        self._loaded: Any = None
        self._states: dict[int, Any] = {}  # after so many batches; None begins an epoch

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self.loader
        self._trained, self._over = 0, False
        self._states, self._loaded = {0: self._loaded}, None
        number = 0
        for number, batch in enumerate(super().__iter__(), 1):
            self._states[number] = loader.state_dict()
            self._states.pop(number - _FETCHED_AHEAD, None)
            yield batch
        self._states[number] = None

    def end_batch(self, *, last: bool) -> None:
        self._trained += 1
        self._over = last

    def state_dict(self) -> dict[str, Any]:
        """Of all ranks with data of their own, for a checkpoint that one of them writes. A collective."""
        state = None if self._over else self._states.get(self._trained)
        # ranks that share a batch have parts of their own where they take turns
        rank = dist.get_rank() if getattr(self.loader, "takes_turns", False) else self._rank
        found: list[Any] = [(rank, state)]
        if _several_ranks():
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, (rank, state), group=self._gloo())
        states = dict(found)
        return {"ranks": [states[rank] for rank in sorted(states)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: another number of ranks wrote it.
        """
        parts = state["ranks"]
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if _several_ranks() else (0, 1)
        if len(parts) not in (ranks, self._ranks):
            raise ValueError(
                f"The checkpoint holds the places of {len(parts)} ranks in their streams, and there are {self._ranks} "
                "now: streams cannot be divided anew. Resume on as many ranks, or from weights alone."
            )
        self._loaded = parts[rank if len(parts) == ranks else self._rank]
        if self._loaded is not None:
            loader: Any = self.loader
            loader.load_state_dict(self._loaded)


_PLACES_EVERY = 64
# Lightning fetches one batch ahead where it does not know how many there are.
_FETCHED_AHEAD = 3


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


_DRY = object()


def packed_stream(
    loader: DataLoader[Any],
    budget: int,
    length_fn: Callable[[Any], int] | None,
    overlong: str,
    ranks: int = 1,
    rank: int = 0,
) -> AgreeingLoader:
    """``loader`` over an ``IterableDataset`` with batches by tokens; its workers and their set-up stay.

    Args:
        ranks, rank: see :class:`AgreeingLoader`; for the rest, :class:`PackedStream`.
    """
    made = copy.copy(loader)
    kind = StatefulPackedStream if hasattr(loader.dataset, "state_dict") else PackedStream
    stream = kind(loader.dataset, loader.collate_fn, budget, length_fn, overlong)  # type: ignore[arg-type]
    for name, value in (("dataset", stream), ("batch_size", None), ("batch_sampler", None), ("drop_last", False)):
        object.__setattr__(made, name, value)  # DataLoader lets nobody but its constructor do so
    made.collate_fn = _as_it_is
    kept = StatefulAgreeingLoader if hasattr(made, "state_dict") else AgreeingLoader
    return kept(made, ranks, rank)


def _as_it_is(batch: Any) -> Any:
    return batch
