"""Tensors in pieces: the shards that :func:`torch.distributed.fsdp.fully_shard` leaves on each rank, and their wholes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_liger.parallel.shard import reshard

# not an attribute of the module: a compiled one hands those on to the module inside
_ACCEPTING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def plain_name(name: str) -> str:
    """``name`` without the prefixes that wrappers (compilation, activation checkpointing, FSDP1) put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def gather(piece: DTensor) -> Tensor:
    """The whole of ``piece`` on its mesh's device. Every rank of the mesh has to call it.

    On a mesh of one rank it is the memory of ``piece`` itself.
    """
    mesh_device = piece.device_mesh.device_type
    # an offloaded shard lies on the CPU, where NCCL cannot reach it
    located: Any = piece.detach() if piece.device.type == mesh_device else piece.detach().to(mesh_device)
    whole: Tensor = located.full_tensor()
    return whole


def piece_of(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's piece of ``whole`` (same shape as ``like``), placed as ``like`` is. Nothing is communicated.

    Only the rows of this rank are read, so a memory-mapped ``whole`` costs each rank its own share.
    """
    mesh, placements = like.device_mesh, like.placements
    device = like.to_local().device
    if not all(isinstance(p, (Shard, Replicate)) for p in placements):
        return distribute_tensor(whole.to(device), mesh, placements, src_data_rank=None)
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    rows = whole
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        rows = rows.narrow(dim, min(start, whole.shape[dim]), length)
    return _from_local(rows.to(device, copy=True), like, whole)


def empty_piece(like: DTensor, dtype: torch.dtype) -> DTensor:
    """An uninitialised tensor of ``dtype``, shaped and placed as ``like``."""
    return _from_local(torch.empty_like(like.to_local(), dtype=dtype, requires_grad=False), like, like)


def empty_rows(shape: torch.Size, dtype: torch.dtype, like: DTensor) -> DTensor:
    """An uninitialised tensor of any ``shape`` on the mesh and device of ``like``, cut along its first dimension."""
    placements = [Shard(0) if isinstance(p, Shard) else Replicate() for p in like.placements] if shape else []
    placements = placements or [Replicate() for _ in like.placements]
    local, _ = compute_local_shape_and_global_offset(shape, like.device_mesh, placements)
    made = torch.empty(local, dtype=dtype, device=like.to_local().device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(made, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _from_local(local: Tensor, like: DTensor, whole: Tensor) -> DTensor:
    stride = torch.empty(whole.shape, device="meta").stride()
    made: Any = DTensor.from_local(
        local.to(like.device_mesh.device_type), like.device_mesh, like.placements, run_check=False,
        shape=whole.shape, stride=stride,
    )  # fmt: skip
    return made if made.device == local.device else made.to(local.device)  # an offloaded shard stays on the CPU


def accept_whole_tensors(module: nn.Module) -> None:
    """Let ``load_state_dict`` of a sharded module take whole tensors: each rank keeps its piece of each.

    So an ordinary checkpoint loads, and user code that loads weights once training has started keeps working.
    """
    for part in module.modules():
        if part not in _ACCEPTING:
            part.register_load_state_dict_pre_hook(_cut_whole_tensors)
            _ACCEPTING.add(part)


def _cut_whole_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        given = state_dict.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(given, Tensor) or isinstance(given, DTensor):
            continue
        if given.shape == parameter.shape:
            state_dict[prefix + name] = piece_of(given, parameter)


def shard_like(copied: nn.Module, module: nn.Module) -> None:
    """Cut the whole parameters of ``copied``, a copy of ``module`` from before it was sharded, as ``module``'s are."""
    reshard(module)
    pattern = {plain_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    cut: dict[int, nn.Parameter] = {}
    for path, part in copied.named_modules():
        for name, parameter in part._parameters.items():
            like = pattern.get(plain_name(f"{path}.{name}" if path else name))
            if parameter is None or isinstance(parameter, DTensor) or not isinstance(like, DTensor):
                continue
            if id(parameter) not in cut:
                piece = piece_of(parameter.detach(), like)
                cut[id(parameter)] = nn.Parameter(piece, requires_grad=parameter.requires_grad)
            part._parameters[name] = cut[id(parameter)]
    accept_whole_tensors(copied)


def any_piece(module: nn.Module) -> DTensor | None:
    """One sharded parameter of ``module``, or ``None``."""
    return next((p for p in module.parameters() if isinstance(p, DTensor)), None)


def pieces_in(tree: Any) -> Iterator[DTensor]:
    """Every :class:`DTensor` in nested mappings, lists and tuples."""
    if isinstance(tree, DTensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from pieces_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from pieces_in(value)


def replace_pieces(tree: Any, change: Callable[[DTensor], Any]) -> Any:
    """``tree`` with each :class:`DTensor` replaced; containers that hold none are handed on as they are."""
    if isinstance(tree, DTensor):
        return change(tree)
    if next(pieces_in(tree), None) is None:
        return tree
    if isinstance(tree, Mapping):
        made: Any = copy.copy(tree)
        for key, value in tree.items():
            made[key] = replace_pieces(value, change)
        return made
    changed = [replace_pieces(value, change) for value in tree]
    if isinstance(tree, tuple):
        return type(tree)(*changed) if hasattr(tree, "_fields") else tuple(changed)
    return changed


def on_cpu(value: Tensor) -> Tensor:
    """A copy in host memory, in pieces if ``value`` is."""
    if value.is_meta:
        return value
    return value.detach().clone() if value.device.type == "cpu" else value.detach().to("cpu")


def copy_with(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """``tree`` in containers of its own, so that nothing changes it later, with each tensor replaced."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        copied = copy.copy(tree)
        for key, value in tree.items():
            copied[key] = copy_with(value, change)
        return copied
    if type(tree) in (list, tuple):
        return type(tree)(copy_with(value, change) for value in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(copy_with(value, change) for value in tree))
    return tree
