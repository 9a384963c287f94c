"""Memory and values for modules that were built on the ``meta`` device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_liger.parallel.initialize import Uninitialised, initial_values, tensors_of
from lightning_liger.parallel.pretrained import (
    Unloadable,
    built_values,
    checkpoint_values,
    disown_uninitialised,
    named_checkpoint,
    pretrained_models,
)
from lightning_liger.parallel.shard import can_be_sharded


class Materializer:
    """Fills the ``meta`` tensors of one module, part by part, with the same values on every rank.

    Rank 0 alone reads the checkpoint or runs the initialisers, on the CPU; the others receive what they need when a part
    is filled, so that there is one copy in host memory for all ranks, and one part on each device.

    Args:
        module: any module. Nothing happens for one without ``meta`` tensors.
        weights: ``"auto"``: the checkpoint that a transformers configuration names (``AutoConfig.from_pretrained``
            remembers where it came from), else the module's own initialisers. ``"init"``: those in any case. Anything
            else: a directory or repository with a checkpoint of the one transformers model in the module.
        note: told where the values came from.
        restored: a Lightning checkpoint will be loaded over them, so that one that a configuration names may be missing.

    Raises:
        Unloadable: the checkpoint cannot be read or does not fit.
        Uninitialised: nothing gives some tensors a value. Both are raised on every rank.
    """

    def __init__(self, module: nn.Module, weights: str, note: Callable[[str], None], *, restored: bool = False) -> None:
        self._paths: dict[int, str] = {}  # id of a meta tensor -> its first path
        self._kept: list[Tensor] = []  # ids are only good while their tensors live
        self._values: dict[str, Tensor] = {}
        self._real: dict[int, Tensor] = {}
        disown_uninitialised(module)
        for path, _, _, tensor in tensors_of(module):
            if is_meta(tensor) and id(tensor) not in self._paths:
                self._paths[id(tensor)] = path
                self._kept.append(tensor)
        if not self._paths:
            return
        notes: list[str] = []
        error: Exception | None = None
        if _rank() == 0:
            try:
                notes = self._find_values(module, weights, restored)
            except (Unloadable, Uninitialised) as found:
                error = found
        error, notes = _from_rank_0((error, notes))
        if error is not None:
            raise error
        for text in notes:
            note(text)

    @property
    def is_needed(self) -> bool:
        return bool(self._paths)

    def _find_values(self, module: nn.Module, weights: str, restored: bool) -> list[str]:
        wanted = list(self._paths.values())
        notes = []
        models = pretrained_models(module, wanted)
        if weights not in ("auto", "init") and len(models) != 1:
            raise Unloadable(
                f"weights={weights!r} names one checkpoint, and the module holds {len(models)} transformers models on the "
                "meta device. Use weights='auto', which loads each from where its configuration came from."
            )
        for path, model in models.items() if weights != "init" else ():
            source = named_checkpoint(model) if weights == "auto" else weights
            if not source:
                continue
            prefix = f"{path}." if path else ""
            inside = [name.removeprefix(prefix) for name in wanted if name.startswith(prefix)]
            try:
                values, missing = checkpoint_values(model, source, inside)
            except Unloadable:
                if restored and weights == "auto":
                    continue
                raise
            self._values.update({prefix + name: value for name, value in values.items()})
            notes.append(f"{path or type(model).__name__}: {len(values)} tensors built on meta loaded from {source}")
            if missing:
                notes.append(f"{path}: not in {source}, newly initialised: {', '.join(missing[:8])}")
        left = [path for path in wanted if path not in self._values]
        if left:
            self._values.update(initial_values(module, left, fallback=built_values))
            if len(left) == len(wanted):
                notes.append(f"{len(left)} tensors built on meta got their values from the model's own initialisers")
        return notes

    # -- part by part ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill_unsharded(self, module: nn.Module, device: torch.device) -> None:
        """Fill what FSDP cannot shard, such as parameters without dimensions, before anything is sharded."""
        self._fill(module, device, lambda tensor: not can_be_sharded(tensor))

    @torch.no_grad()
    def fill(self, part: nn.Module, device: torch.device) -> None:
        """Give ``part``'s tensors memory on ``device``: rank 0's with their values, the others' to be broadcast.

        Submodules that are groups of FSDP's are left to :meth:`fill_sharded`. Parameters are replaced by new objects;
        shared ones stay shared. Tensors that are plain attributes, which no broadcast of parameters and buffers finds,
        are equal on all ranks afterwards.
        """
        self._fill(part, device, lambda tensor: True)

    def _fill(self, part: nn.Module, device: torch.device, chosen: Callable[[Tensor], bool]) -> None:
        for owner, name, tensor in list(_own(part)) if self._paths else ():
            if is_meta(tensor) and chosen(tensor):
                made = self._made(tensor, device)
                _put(owner, name, made)
                if name in vars(owner) and dist.is_initialized():
                    dist.broadcast(made, src=0)

    def _made(self, tensor: Tensor, device: torch.device) -> Tensor:
        if id(tensor) in self._real:
            return self._real[id(tensor)]
        # a parameter cast after it was found is the same object, of another dtype
        path = self._paths[id(tensor)]
        if _rank() == 0:
            made = self._values.pop(path).detach().to(device, tensor.dtype)
        else:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        self._real[id(tensor)] = made
        return made

    @torch.no_grad()
    def fill_sharded(self, module: nn.Module, device: torch.device) -> None:
        """The same for what was sharded on ``meta`` by the user's code: each rank receives its pieces.

        A collective, to be called once every group is made.
        """
        if not self._paths:
            return
        for _, owner, name, tensor in list(tensors_of(module)):
            if is_meta(tensor) and not isinstance(tensor, DTensor):
                is_new = id(tensor) not in self._real
                made = self._made(tensor, device)
                _put(owner, name, made)
                if is_new and dist.is_initialized():
                    dist.broadcast(made.data, src=0)
        pieces = {path: t for path, _, _, t in tensors_of(module) if isinstance(t, DTensor) and is_meta(t)}
        first = {path: self._paths[id(t)] for path, t in pieces.items()}
        module._apply(lambda t: torch.empty_like(t, device=device) if isinstance(t, DTensor) and is_meta(t) else t)
        placed: dict[str, DTensor] = {}
        for path, owner, name, tensor in list(tensors_of(module)):
            if path not in first:
                continue
            if first[path] in placed:
                owner._parameters[name] = placed[first[path]]  # type: ignore[assignment]  # shared, as before
                continue
            assert isinstance(tensor, DTensor)
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device_mesh.device_type)
            if _rank() == 0:
                whole.copy_(self._values.pop(first[path]))
            local = distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local()
            tensor.to_local().copy_(local)
            placed[first[path]] = tensor


def is_meta(tensor: Tensor) -> bool:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).device.type == "meta"


def _own(part: nn.Module) -> Any:
    """``(owner, name, tensor)`` of what no group inside of ``part`` holds."""
    grouped: set[nn.Module] = set()
    for inner in part.modules():
        if inner is not part and isinstance(inner, FSDPModule):
            grouped.update(inner.modules())
    for _, owner, name, tensor in tensors_of(part):
        if owner not in grouped and not isinstance(tensor, DTensor):
            yield owner, name, tensor


def _put(owner: nn.Module, name: str, tensor: Tensor) -> None:
    for store in (owner._parameters, owner._buffers, vars(owner)):
        if name in store:
            store[name] = tensor  # type: ignore[assignment]
            return


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _from_rank_0(value: Any) -> Any:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
