"""Decoders whose blocks FSDP2 gathers one by one: its hooks see rows, and all ranks ask at the same call for the proof.

A pass of such a decoder is a collective. Packed or padded, a call makes one pass over each block, so every rank may decide
for itself; only the proof runs more of them. For it the blocks are gathered whole on all ranks, at a call that they all
agree on through the store of the process group, without a word to the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map
from torch.utils.hooks import RemovableHandle

from lightning_liger.padding.plain_decoder.ragged import Packing, RaggedTensor, rows_of, wrap
from lightning_liger.parallel.gathering import Gathering
from lightning_liger.parallel.groups import parameters_of, sharded_parts

PATIENCE = 100  # calls without padding on any rank, each of which costs a message to the store


class _Place:
    """What makes rows a ragged tensor again; of no kind that anybody looks into."""

    __slots__ = ("batch", "packing", "seq")

    def __init__(self, packing: Packing, batch: int, seq: int) -> None:
        self.packing, self.batch, self.seq = packing, batch, seq


class Carried(NamedTuple):
    """A ragged tensor on its way through hooks that cast, and hang on, what they find in containers."""

    rows: Tensor
    place: _Place


def _carry(tree: Any) -> Any:
    def carried(value: Any) -> Any:
        if not isinstance(value, RaggedTensor):
            return value
        return Carried(rows_of(value), _Place(value.packing, value.batch, value.seq))

    return tree_map(carried, tree)


def _unpack(tree: Any) -> Any:
    def ragged(value: Any) -> Any:
        if not isinstance(value, Carried):
            return value
        return wrap(value.rows, value.place.packing, value.place.batch, value.place.seq)

    return tree_map(ragged, tree, is_leaf=_is_carried)


def _is_carried(value: Any) -> bool:
    return isinstance(value, Carried)


class _Around:
    """Hooks of one sharded module, before and after those of FSDP on either side of its forward."""

    def __init__(self, module: nn.Module) -> None:
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._carry_in, prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(self._unpack_in, with_kwargs=True),
            module.register_forward_hook(self._carry_out, prepend=True),
            module.register_forward_hook(self._unpack_out),
        ]

    def _carry_in(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _holds(RaggedTensor, (args, kwargs)):
            return None
        return _carry((args, kwargs))

    def _unpack_in(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _holds(Carried, (args, kwargs)):
            return None
        return _unpack((args, kwargs))

    def _carry_out(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if torch.compiler.is_compiling() or not _holds(RaggedTensor, output) else _carry(output)

    def _unpack_out(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if torch.compiler.is_compiling() or not _holds(Carried, output) else _unpack(output)


def _holds(kind: type, tree: Any) -> bool:
    return tree_any(lambda value: isinstance(value, kind), tree, is_leaf=lambda value: isinstance(value, kind))


class ShardedBlocks:
    """The parts of one decoder that FSDP2 gathers by themselves.

    Args:
        decoder: the module.
        parts: those parts, at least one.
    """

    _runs = 0

    def __init__(self, decoder: nn.Module, parts: list[Any]) -> None:
        self._around = [_Around(part) for part in parts]
        mesh = _mesh_of(parts)
        self._size: int = mesh.size()
        self._gathering = Gathering(decoder, _device(mesh.device_type))
        self._place = ""
        self._met = 0
        self._calls = 0

    def remove(self) -> None:
        for around in self._around:
            for handle in around.handles:
                handle.remove()

    def anyone(self, wants: bool) -> bool | None:
        """Whether some rank wants the proof at this call, which they all make; None once there were too many calls."""
        self._calls += 1
        if self._meet("x" if wants else "") != "":
            return True
        return None if self._calls >= PATIENCE else False

    def fits(self) -> bool:
        """Whether every rank has memory for the gathered blocks. A collective."""
        return self._gathering.fits()

    def whole(self) -> AbstractContextManager[None]:
        """The blocks gathered: passes in this context are nobody else's business. A collective."""
        return self._gathering.whole()

    def objection(self, reason: str) -> str:
        """The first reason that some rank has, or ``""``."""
        return self._meet(reason)

    def _meet(self, word: str) -> str:
        """What one of the ranks said that said anything, once all have come."""
        if self._size == 1:
            return word
        store: Any = dist.distributed_c10d._get_default_store()
        if not self._place:  # ranks first meet in the same order, whatever one of them has evaluated alone
            ShardedBlocks._runs += 1
            self._place = f"lightning_liger/decoder/{ShardedBlocks._runs}"
        self._met += 1
        key = f"{self._place}/{self._met}"
        if word:
            store.set(f"{key}/word", word)
            store.add(f"{key}/said", 1)
        if store.add(f"{key}/came", 1) == self._size:
            said = store.add(f"{key}/said", 0) > 0
            store.set(f"{key}/all", store.get(f"{key}/word") if said else b"-")
        store.wait([f"{key}/all"])
        found = store.get(f"{key}/all").decode()
        if self._met > 1:  # everybody has read the one before
            for name in ("word", "said", "came", "all"):
                store.delete_key(f"{self._place}/{self._met - 1}/{name}")
        return "" if found == "-" else found


def _device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _mesh_of(parts: list[Any]) -> Any:
    return next(p.sharded_param.device_mesh for part in parts for p in parameters_of(part))


def sharded_blocks(decoder: nn.Module) -> ShardedBlocks | None:
    """What FSDP2 gathers by itself inside of ``decoder``, over all ranks of the job; None where that is not how it is."""
    whole: Any = decoder
    parts = [m for m in sharded_parts(decoder) if m is not whole]
    if not any(parameters_of(part) for part in parts) or _mesh_of(parts).size() != dist.get_world_size():
        return None
    return ShardedBlocks(decoder, parts)


Proof = Callable[[], str]


def agreed_reason(blocks: ShardedBlocks, proof: Proof) -> str:
    """Make the proof on every rank, and return what one of them found against it. All ranks call it."""
    if not blocks.fits():
        return "there was no memory to compare it with the padded run, for which its blocks are gathered"
    with blocks.whole():
        found = proof()
    return blocks.objection(found)
