"""Streams that divide themselves among all ranks: those that share a batch take turns in reading it.

A stream asks the process group, the environment or the Trainer which rank it is on, and no sampler tells it otherwise. Where
the first batches of a group differ, each of its ranks has a part of the stream that no other has: the group runs a batch
of the first rank's part, then one of the second's, and so on, and nothing of the stream is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_liger.parallel.same_batch import SameBatch, fingerprint

_DRY = object()


class Turns:
    """The same batches on all ranks of a group, whatever each rank's own loader holds.

    Args:
        same_batch: of the group. note: is called when ranks begin to take turns.

    Attributes:
        taken: they do.
    """

    def __init__(self, same_batch: SameBatch, note: Callable[[], None]) -> None:
        self._same_batch = same_batch
        self._note = note
        self.taken = False

    def take(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Collectives of the group, one for a batch that is handed on."""
        held = next(batches, _DRY)
        if self._same_batch.agree(0 if held is _DRY else fingerprint(held)):
            if held is not _DRY:
                yield held
                yield from batches
            return
        self.taken = True
        self._note()
        ranks, group = self._same_batch.ranks, self._same_batch.group
        dry: set[int] = set()
        for owner in itertools.cycle(ranks):
            if owner in dry:
                continue
            sent: list[Any] = [None, None]
            if owner == dist.get_rank():
                sent = [held is not _DRY, None if held is _DRY else held]
                held = next(batches, _DRY)
            dist.broadcast_object_list(sent, src=owner, group=group)
            there_is_one, batch = sent
            if there_is_one:
                yield batch
                continue
            dry.add(owner)
            if len(dry) == len(ranks):
                return


def _turning(kind: Any) -> Any:
    """A class beside ``kind`` that a loader of it can become; one with two bases would be laid out otherwise."""

    def iterate(self: Any) -> Iterator[Any]:
        turns: Turns = self._turns
        return turns.take(kind.__iter__(self))

    takes = property(lambda self: self._turns.taken)
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__iter__": iterate, "takes_turns": takes})


def take_turns(loader: Any, turns: Turns) -> None:
    """Let a loader over a stream of unknown length hand the group's batches out. Others stay as they are."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset) or _has_length(loader):
        return
    if not hasattr(loader, "takes_turns"):
        loader.__class__ = _turning(type(loader))
    loader._turns = turns


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
