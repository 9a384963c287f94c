"""Keeping every block whole for a while, so that nothing that runs in it needs another rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn

from lightning_liger.device_memory import free_bytes as cuda_free_bytes
from lightning_liger.parallel.groups import (
    begin_as_root,
    is_gathered,
    noted_passes,
    parameters_of,
    policy,
    sharded_parts,
    stay_gathered,
    whole_and_shard,
)

# What evaluation needs besides the parameters (activations, logits, KV caches) is not known in advance.
_SHARE_OF_FREE = 0.6


class WrittenWhileWhole(RuntimeError):
    """Parameters were written to while they were gathered; the shards do not know."""


class Gathering:
    """All of a sharded module's parameters, gathered for a while.

    Gathering is a collective: every rank has to enter at the same point of the program. Inside, and at the end, ranks are
    on their own: they may run any number of forward passes of any length, or none.

    Args:
        root: the sharded module.
        device: where parameters are gathered.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._root = root
        self._device = device
        self._depth = 0
        self._restore: list[Callable[[], None]] = []

    @property
    def is_whole(self) -> bool:
        return self._depth > 0

    def bytes(self) -> int:
        """What gathering would add to the memory of this device."""
        return sum(
            parameter._orig_size.numel() * (policy(part).param_dtype or parameter.sharded_param.dtype).itemsize
            for part in sharded_parts(self._root)
            if not is_gathered(part)
            for parameter in parameters_of(part)
        )

    def fits(self) -> bool:
        """Whether every rank has the memory; the same answer on all of them. A collective."""
        answer = torch.tensor(float(self.bytes() <= _SHARE_OF_FREE * free_bytes(self._device)), device=self._device)
        dist.all_reduce(answer, dist.ReduceOp.MIN)
        return bool(answer.item())

    def enter(self) -> None:
        """Gather. A collective, but for the second and later of nested calls."""
        self._depth += 1
        if self._depth > 1:
            return
        parts = list(sharded_parts(self._root))
        begin_as_root(parts[0])  # the root itself comes first
        # what is allocated in inference mode could not be trained with afterwards
        with torch.inference_mode(False):
            for part in parts:
                part.unshard()
        self._restore = [noted_passes(parts), *(stay_gathered(part) for part in parts)]

    def exit(self) -> None:
        """Free what was gathered. Nothing happens if nothing is.

        Raises:
            WrittenWhileWhole: somebody wrote to a gathered parameter, and the shards would not have it.
        """
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        written = self._written()
        for restore in self._restore:
            restore()
        self._restore = []
        for part in sharded_parts(self._root):
            part.reshard()
        if written:
            raise WrittenWhileWhole(
                f"{', '.join(written[:4])}{', …' if len(written) > 4 else ''} changed while the model was gathered for "
                "evaluation, which would be lost: training goes on with the shards. Write weights before "
                "on_validation_start or after on_validation_end, or keep them sharded with "
                "LigerFSDPStrategy(gather_in_evaluation=False)."
            )

    def _written(self) -> list[str]:
        """Names of parameters whose gathered values are not those of the shards."""
        found = []
        for part in sharded_parts(self._root):
            for parameter in parameters_of(part) if is_gathered(part) else ():
                # as bytes: a parameter that is NaN was not written to for that
                piece, shard = (t.contiguous().view(-1).view(torch.uint8) for t in whole_and_shard(parameter))
                if not torch.equal(piece, shard):
                    found.append(parameter._param_fqn or parameter._module_info.param_name)
        return found

    @contextmanager
    def whole(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.exit()

    @contextmanager
    def forgotten(self) -> Iterator[None]:
        """Forward passes inside leave no trace in the order that backward prefetches by."""
        forget = noted_passes(sharded_parts(self._root))
        try:
            yield
        finally:
            forget()


def free_bytes(device: torch.device) -> int:
    """Memory that this process may still allocate on ``device``; for CPUs, its share of what the machine has."""
    if device.type == "cuda":
        return cuda_free_bytes(device)
    return host_bytes("MemAvailable") // max(dist.get_world_size() if dist.is_initialized() else 1, 1)


def host_bytes(entry: str = "MemTotal") -> int:
    """An entry of ``/proc/meminfo`` in bytes; where there is none, more than anybody asks for."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:"))
    except (OSError, StopIteration):
        return 1 << 62
