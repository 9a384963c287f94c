"""What blocks keep for backward waits in host memory, and is back on the device before its block needs it.

Saved tensors are caught by hooks of autograd, as torchtune's ``OffloadActivations`` does, and moved block by block, as
Transformer Engine's ``cpu_offload`` does: while a block computes, a side stream copies what it saves to pinned memory;
the device's memory is given back one block later; and when a block's backward begins, the copy of the one before it is
started. Of the last block nothing is moved, because its backward comes first.

Whole storages are moved, and tensors made anew as views of them: what several operators save of one storage, such as
query, key and value of a fused projection, is copied once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_liger.parallel.recompute import inside_checkpoint

# As in torchtune: smaller tensors cost more in bookkeeping than they free.
LEAST_BYTES = 2**20
# Blocks whose tensors are on the device at a time: one that computes, one that is copied, and the last.
BLOCKS_ON_DEVICE = 3
NO_EFFECT = "activation_offload=True has no effect here: activations are in host memory already"
_NOTHING = "activation_offload=True moved nothing: blocks keep no tensor of 1 MiB or more for backward"
_THEIRS = "activation_offload=True leaves blocks alone that the model's own gradient checkpointing recomputes"


class Lane:
    """A stream of its own for copies between device and pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def to_host(self, flat: Tensor) -> tuple[Tensor, Any]:
        """A copy that has begun, and the event of its end."""
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        return self._copied(host, flat)

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """The same in the other direction; memory is of the stream that computes."""
        return self._copied(torch.empty(host.shape, dtype=host.dtype, device=self.device), host)

    def _copied(self, target: Tensor, source: Tensor) -> tuple[Tensor, Any]:
        # after what made the source, and after whoever used the target's memory before
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return target, self.stream.record_event()

    def wait(self, event: Any) -> None:
        """What the current stream is given from here on runs after ``event``."""
        torch.cuda.current_stream(self.device).wait_event(event)


def lane_for(device: torch.device) -> Lane | None:
    """None where device memory is host memory."""
    return Lane(device) if device.type == "cuda" else None


@dataclass
class _Moved:
    """One storage: bytes on the device while they are there, bytes in host memory, and the latest copy's end."""

    device: Tensor | None
    host: Tensor
    event: Any
    left: bool = False


@dataclass(frozen=True)
class _View:
    """What autograd holds in place of a saved tensor."""

    group: _Group
    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _Group:
    """What one call of one block has saved."""

    def __init__(self, lane: Lane, before: _Group | None) -> None:
        self.lane = lane
        # weak: what was saved lives as long as the graph does
        self._before = None if before is None else weakref.ref(before)
        self._known: dict[int, _Moved] = {}
        self.bytes = 0

    def save(self, tensor: Tensor) -> _View:
        storage = tensor.untyped_storage()
        moved = self._known.get(storage.data_ptr())
        if moved is None:
            flat = _bytes_of(tensor)
            moved = _Moved(flat, *self.lane.to_host(flat))
            self._known[storage.data_ptr()] = moved
            self.bytes += flat.numel()
        return _View(self, moved, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def leave_device(self) -> None:
        """Give the device's memory back, once the copies have been made."""
        for moved in self._known.values():
            self.lane.wait(moved.event)
            moved.device, moved.left = None, True

    def come_back(self) -> None:
        """Begin to copy what is not on the device."""
        for moved in self._known.values():
            if moved.device is None:
                moved.device, moved.event = self.lane.to_device(moved.host)

    def load(self, view: _View) -> Tensor:
        """A saved tensor; those of the block before it begin to come back too."""
        self.come_back()
        if self._before is not None and (before := self._before()) is not None:
            before.come_back()
        self.lane.wait(view.moved.event)
        assert view.moved.device is not None
        made = torch.empty(0, dtype=view.dtype, device=view.moved.device.device)
        return made.set_(view.moved.device.untyped_storage(), view.offset, view.size, view.stride)

    def forget(self) -> None:
        """Backward has passed: another one would fetch everything again."""
        for moved in self._known.values():
            if moved.left and moved.device is not None:
                self.lane.wait(moved.event)
                moved.device = None

    def __del__(self) -> None:
        if not vars(self):  # a tracer of compiled code makes objects without ever calling their __init__
            return
        # a graph that is dropped without its backward: nobody may use the memory while it is copied
        for moved in self._known.values():
            if moved.device is not None:
                self.lane.wait(moved.event)


def offload_activations(
    blocks: Sequence[nn.Module], device: torch.device, note: Callable[[str], None]
) -> ActivationOffload | None:
    """Offload what ``blocks`` keep; None, and a note, where that has no effect."""
    lane = lane_for(device)
    if lane is None:
        note(NO_EFFECT)
    elif len(blocks) < 2:
        note("activation_offload=True found no blocks whose activations could wait elsewhere")
    else:
        return ActivationOffload(blocks, lane, note)
    return None


class ActivationOffload:
    """Hooks on blocks, until :meth:`close`.

    Args:
        blocks: in the order in which they run.
        lane: copies.
        note: told, once for each reason, why something is not moved.

    Attributes:
        bytes: moved to host memory so far.
    """

    def __init__(self, blocks: Sequence[nn.Module], lane: Lane, note: Callable[[str], None]) -> None:
        self.lane = lane
        self.note = note
        self.bytes = 0
        self.calls = 0
        self._last = blocks[-1] if blocks else None
        self._open: list[tuple[nn.Module, saved_tensors_hooks | None, _Group | None]] = []
        self._groups: list[_Group] = []  # those that are still on the device, the latest last
        self._in_backward: weakref.ref[_Group] | None = None
        self._handles: list[Any] = []
        for block in blocks:
            self._handles.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._exit, always_call=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._groups.clear()

    def check(self) -> None:
        """Say so where steps have run and nothing was moved."""
        if self.calls and not self.bytes:
            self.note(_NOTHING)

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hooks = group = None
        if self._takes_part():
            self.calls += 1
            self._leave()
            if block is not self._last:
                group = _Group(self.lane, self._groups[-1] if self._groups else None)
                hooks = self._hooks(group, _stays(block, args, kwargs))
                hooks.__enter__()
        self._open.append((block, hooks, group))

    def _takes_part(self) -> bool:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling():
            return False
        if inside_checkpoint():
            self.note(_THEIRS)
            return False
        return True

    def _exit(self, block: nn.Module, args: Any, output: Any) -> None:
        if not self._open or self._open[-1][0] is not block:
            return
        _, hooks, group = self._open.pop()
        if hooks is not None and group is not None:
            hooks.__exit__(None, None, None)
            self._groups.append(group)
            self.bytes += group.bytes

    def _leave(self) -> None:
        """All but the latest group have had the time of a block for their copies."""
        while len(self._groups) > 1:
            self._groups.pop(0).leave_device()

    def _hooks(self, group: _Group, stays: set[int]) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Any:
            if type(tensor) is not Tensor or tensor.device != self.lane.device or not tensor.is_floating_point():
                return tensor
            storage = tensor.untyped_storage()
            if storage.nbytes() < LEAST_BYTES or storage.data_ptr() in stays:
                return tensor
            return group.save(tensor)

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, _View):
                return saved
            self._reached(saved.group)
            return saved.group.load(saved)

        return saved_tensors_hooks(pack, unpack)

    def _reached(self, group: _Group) -> None:
        """Backward has come to this group."""
        latest = self._in_backward() if self._in_backward is not None else None
        if latest is not group:
            if latest is not None:
                latest.forget()
            self._in_backward = weakref.ref(group)
            self._groups = [g for g in self._groups if g is not group]


def _stays(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Storages that live on whatever this block saves: parameters, buffers, and arguments that all blocks share."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    hidden = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
    shared = [t for t in tensors if t is not hidden]
    whole = [*block.parameters(), *block.buffers(), *shared]
    return {t.untyped_storage().data_ptr() for t in whole if type(t) in (Tensor, nn.Parameter)} - {0}


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage as a flat tensor."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))
