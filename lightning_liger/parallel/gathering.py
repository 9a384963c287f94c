"""Keeping every block whole for a while, so that nothing that runs in it needs another rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

# What evaluation needs besides the parameters (activations, logits, KV caches) is not known in advance.
_SHARE_OF_FREE = 0.6


class WrittenWhileWhole(RuntimeError):
    """Parameters were written to while they were gathered; the shards do not know."""


class Gathering:
    """All of a sharded module's parameters, gathered for a while.

    Gathering is a collective: every rank has to enter at the same point of the program. Inside, and at the end, ranks are
    on their own: they may run any number of forward passes of any length, or none.

    FSDP2's private state is read for what its public interface does not say: what a group will do after its forward, and
    the order of forward passes, which it notes for backward and which thousands of decoding steps would fill.

    Args:
        root: the sharded module.
        device: where parameters are gathered.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._root: Any = root
        self._device = device
        self._depth = 0
        self._before: list[tuple[Any, Any]] = []
        self._noted: list[tuple[list[Any], int]] = []

    @property
    def is_whole(self) -> bool:
        return self._depth > 0

    @property
    def groups(self) -> list[Any]:
        return [g for m in self._root.modules() if isinstance(m, FSDPModule) for g in groups_of(m)]

    def bytes(self) -> int:
        """What gathering would add to the memory of this device."""
        needed = 0
        for group in self.groups:
            for parameter in () if group.is_unsharded else group.fsdp_params:
                dtype = parameter.mp_policy.param_dtype or parameter.sharded_param.dtype
                needed += parameter._orig_size.numel() * dtype.itemsize
        return needed

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
        self._root._get_fsdp_state()._lazy_init()
        # what is allocated in inference mode could not be trained with afterwards
        with torch.inference_mode(False):
            for module in self._root.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
        self._before = [(group, group.post_forward_mesh_info) for group in self.groups]
        for group, _ in self._before:
            group.post_forward_mesh_info = None  # stays whole after its forward
        self._noted = self._passes()

    def exit(self) -> None:
        """Free what was gathered.

        Raises:
            WrittenWhileWhole: somebody wrote to a gathered parameter, and the shards would not have it.
        """
        self._depth -= 1
        if self._depth > 0:
            return
        written = self._written()
        # ranks that ran passes of their own would gather in orders of their own in the next backward
        self._forget(self._noted)
        for group, mesh_info in self._before:
            group.post_forward_mesh_info = mesh_info
        self._before = []
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if written:
            raise WrittenWhileWhole(
                f"{', '.join(written[:4])}{', …' if len(written) > 4 else ''} changed while the model was gathered for "
                "evaluation, which would be lost: training goes on with the shards. Write weights between "
                "on_*_start and on_*_end of no evaluation loop, or set LigerFSDPStrategy(gather_in_evaluation=False)."
            )

    def _written(self) -> list[str]:
        """Names of parameters whose gathered values are not those of the shards."""
        found = []
        for group, _ in self._before:
            for parameter in group.fsdp_params if group.is_unsharded else ():
                if not torch.equal(*_piece_and_shard(parameter)):
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
        before = self._passes()
        try:
            yield
        finally:
            self._forget(before)

    def _passes(self) -> list[tuple[list[Any], int]]:
        """The lists in which FSDP notes forward passes, and how long they are."""
        groups = self.groups
        orders = {id(g.comm_ctx.post_forward_order): g.comm_ctx.post_forward_order for g in groups}
        lists = [*orders.values(), *(g._post_forward_indices for g in groups)]
        return [(entries, len(entries)) for entries in lists]

    def _forget(self, before: list[tuple[list[Any], int]]) -> None:
        for entries, length in before:
            del entries[length:]


def groups_of(module: Any) -> list[Any]:
    """The parameter groups of one sharded module; earlier releases of PyTorch know a single one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _piece_and_shard(parameter: Any) -> tuple[Tensor, Tensor]:
    """The bytes of this rank's piece of a gathered parameter, and of the shard that it was gathered from."""
    shard = parameter._sharded_local_tensor.detach()
    whole = parameter._unsharded_param.detach()
    dimension, info = parameter.fsdp_placement.dim, parameter.mesh_info
    pieces = torch.chunk(whole, info.shard_mesh_size, dim=dimension)
    piece = pieces[info.shard_mesh_rank] if info.shard_mesh_rank < len(pieces) else whole.narrow(dimension, 0, 0)
    expected = shard.to(piece.device, piece.dtype).reshape(piece.shape)
    return piece.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)


def free_bytes(device: torch.device) -> int:
    """Memory that this process may still allocate on ``device``; for CPUs, its share of what the machine has."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return host_bytes("MemAvailable") // max(dist.get_world_size() if dist.is_initialized() else 1, 1)


def host_bytes(entry: str = "MemTotal") -> int:
    """An entry of ``/proc/meminfo`` in bytes; where there is none, more than anybody asks for."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:"))
    except (OSError, StopIteration):
        return 1 << 62
