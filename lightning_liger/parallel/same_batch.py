"""Ranks that share a batch really have the same one, and draw the same random numbers in the user's code."""

from __future__ import annotations

import pickle
import random
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

# Bytes of a tensor that are looked at from each end: a batch of 100,000 tokens, whole.
_LOOKED_AT = 2**20


class SameBatch:
    """Compares what the ranks of a group are about to run, batch by batch, over their hosts.

    Args:
        device: whose random numbers the user's code draws besides the CPU's.
        ranks: those of this group. Making it is a collective of all ranks.
    """

    def __init__(self, device: torch.device, ranks: Sequence[int]) -> None:
        self._device = device
        self.ranks = list(ranks)
        # over the hosts: nobody waits for a device
        self.group: Any = _own_group(self.ranks)

    def check(self, batch: Any, trainer: Any) -> None:
        """Before a batch is moved to the device. A collective of the group.

        Raises:
            ValueError: the ranks of the group have different batches.
        """
        same, alike = self._agree(fingerprint(batch), self._randomness())
        if not same:
            raise ValueError(_explanation(self.ranks, trainer))
        if not alike:
            self.share_randomness()

    def agree(self, value: int) -> bool:
        """Whether all ranks of the group have this value. A collective of the group."""
        return self._agree(value)[0]

    def _agree(self, *values: int) -> list[bool]:
        mine = torch.tensor(values, dtype=torch.int64)
        both = torch.cat([mine, -mine])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
        largest, smallest = both[: len(values)], -both[len(values) :]
        return (largest == smallest).tolist()

    def share_randomness(self) -> None:
        """Go on from the random state of the group's first rank, wherever numbers come from. A collective of the group.

        A rank may have drawn more than the others: one that logs samples, say.
        """
        states: list[Any] = [
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        ]
        dist.broadcast_object_list(states, src=self.ranks[0], group=self.group)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if states[3] is not None:
            torch.cuda.set_rng_state(states[3], self._device)

    def _randomness(self) -> int:
        found = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        if self._device.type == "cuda":
            found = zlib.crc32(torch.cuda.get_rng_state(self._device).numpy().tobytes(), found)
        return zlib.crc32(pickle.dumps((random.getstate(), np.random.get_state())), found)


def _own_group(ranks: list[int]) -> Any:
    """A gloo group of these ranks; all ranks make one, each its own."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ranks)
    for group in dict.fromkeys(map(tuple, everyone)):
        made = dist.new_group(list(group), backend="gloo")
        if list(group) == ranks:
            own = made
    return own


def fingerprint(batch: Any) -> int:
    """Of what ``batch`` holds in host memory: the same for equal batches, and practically never for others."""
    found = 0
    for leaf in tree_leaves(batch):
        for part in _parts(leaf):
            found = zlib.crc32(part, found)
    return found


def _parts(leaf: Any) -> Iterable[Any]:
    if isinstance(leaf, Tensor):
        yield f"{leaf.dtype}{tuple(leaf.shape)}".encode()
        if leaf.device.type == "cpu" and leaf.layout is torch.strided and leaf.numel():
            held = leaf.detach().contiguous().flatten().view(torch.uint8).numpy()
            yield held[:_LOOKED_AT]
            yield held[_LOOKED_AT:][-_LOOKED_AT:]
    elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
        yield np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)[:_LOOKED_AT]
    elif isinstance(leaf, (str, int, float, bool, bytes)) or leaf is None:
        yield repr(leaf).encode()
    else:
        yield type(leaf).__qualname__.encode()  # whose contents may hold addresses


def _explanation(ranks: Sequence[int], trainer: Any) -> str:
    who = f"Ranks {', '.join(map(str, ranks))} share one batch (sequence_parallel_size={len(ranks)}) and have different ones"
    loader = _loader_of(trainer)
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    divide = (
        "Divide by group of ranks: trainer.strategy.distributed_sampler_kwargs says how many there are (num_replicas) and "
        "which this is (rank), where global_rank and world_size count every rank"
    )
    if isinstance(dataset, IterableDataset):
        return f"{who}: {type(dataset).__name__} divides its stream by rank, or shuffles it with a seed of the rank. {divide}."
    if loader is None or sampler is None:
        return f"{who}: they come from a {type(loader).__name__}. {divide}, and draw with the same seed in a group."
    return (
        f"{who}: their {type(sampler).__name__} draws by rank or with a seed of its own, or {type(dataset).__name__} draws "
        f"random numbers. Let Lightning divide the data (use_distributed_sampler=True, the default), or: {divide}. "
        "Randomness needs one seed: lightning.seed_everything(42, workers=True)."
    )


def _loader_of(trainer: Any) -> Any:
    """The first loader of the loop that runs now."""
    if trainer.validating or trainer.sanity_checking:
        loop = trainer.validate_loop if trainer.state.fn == "validate" else trainer.fit_loop.epoch_loop.val_loop
    else:
        loop = trainer.test_loop if trainer.testing else trainer.fit_loop
    combined = getattr(loop, "_combined_loader", None)
    return combined.flattened[0] if combined is not None and combined.flattened else None
