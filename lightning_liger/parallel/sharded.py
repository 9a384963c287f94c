"""Checkpoints as a directory in the format of :mod:`torch.distributed.checkpoint`, one file per rank.

The layout is that of Lightning's ``ModelParallelStrategy``: ``state_dict.<name>``,
``optimizer_<i>.state.<parameter>.<key>``, ``optimizer_<i>.param_groups``, and everything else in ``meta.pt``. Pieces of
tensors that callbacks or the module put elsewhere go to ``pieces.<i>``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_liger.parallel.pieces import empty_piece, empty_rows, plain_name, replace_pieces

META = "meta.pt"
_MODEL_KEYS = ("state_dict", "model")  # "model": directories of Lightning's FSDPStrategy
_MARK = "liger-piece:"


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is a directory that a sharded save left."""
    return path.is_dir() and (path / META).is_file() and (path / ".metadata").is_file()


def split(
    checkpoint: Mapping[str, Any], optimizers: list[dict[str, Any]] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What every rank writes its part of, and what rank 0 writes alone.

    Args:
        checkpoint: A Lightning checkpoint with tensors in pieces.
        optimizers: Optimizer states by parameter name; ``None`` leaves ``checkpoint["optimizer_states"]`` as it is.
    """
    apart = ("state_dict",) if optimizers is None else ("state_dict", "optimizer_states")
    shared: dict[str, Any] = {"state_dict": dict(checkpoint["state_dict"])}
    shared |= {f"optimizer_{i}": state for i, state in enumerate(optimizers or [])}
    pieces: list[DTensor] = []

    def mark(piece: DTensor) -> str:
        pieces.append(piece)
        return f"{_MARK}{len(pieces) - 1}"

    rest = replace_pieces({k: v for k, v in checkpoint.items() if k not in apart}, mark)
    if pieces:
        shared["pieces"] = {str(i): piece.detach() for i, piece in enumerate(pieces)}
    return shared, rest


def write(shared: dict[str, Any], rest: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write a directory; every rank calls it, ``rest`` is taken from rank 0."""
    alone = not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process")
        dcp.save(shared, storage_writer=FileSystemWriter(folder), process_group=group, no_dist=alone)
    if alone or dist.get_rank() == 0:
        with open(folder / META, "wb") as file:
            torch.save(rest, file)


def read(
    folder: Path,
    parameters: Mapping[str, Tensor],
    wanted: Callable[[tuple[Any, ...]], bool] = lambda path: True,
    weights_only: bool | None = None,
    alone: bool = False,
) -> dict[str, Any]:
    """A Lightning checkpoint from ``folder``.

    Args:
        folder: The directory.
        parameters: By plain name, the parameters that take the values. What belongs to a sharded one is read as this
            rank's piece only, whatever the number of ranks that wrote it.
        wanted: Whether to read what lies at a path such as ``("optimizer_0", "state", name, "exp_avg")``.
        weights_only: As in :func:`torch.load`, for ``meta.pt``.
        alone: Read without the other ranks, which otherwise all call this.

    Returns:
        The checkpoint; ``optimizer_states`` refer to parameters by name.
    """
    metadata = FileSystemReader(folder).read_metadata()
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
    some_piece = next((p for p in parameters.values() if isinstance(p, DTensor)), None)
    flat: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        path = paths.get(key, (key,))
        if not wanted(path):
            continue
        flat[key] = None
        if isinstance(stored, TensorStorageMetadata):
            flat[key] = _room_for(stored, _owner(path, parameters), path, some_piece)
    alone = alone or not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        dcp.load(flat, storage_reader=FileSystemReader(folder), planner=DefaultLoadPlanner(), no_dist=alone)
    rest = torch.load(folder / META, map_location="cpu", weights_only=weights_only)
    return _join({paths.get(key, (key,)): value for key, value in flat.items()}, rest)


def _owner(path: tuple[Any, ...], parameters: Mapping[str, Tensor]) -> Tensor | None:
    if path[0] in _MODEL_KEYS and len(path) > 1:
        return parameters.get(plain_name(str(path[1])))
    if str(path[0]).startswith("optimizer_") and len(path) > 2 and path[1] == "state":
        return parameters.get(plain_name(str(path[2])))
    return None


def _room_for(
    stored: TensorStorageMetadata, owner: Tensor | None, path: tuple[Any, ...], some: DTensor | None
) -> Tensor:
    dtype = stored.properties.dtype
    if isinstance(owner, DTensor) and owner.shape == stored.size:
        return empty_piece(owner, dtype)
    if path[0] == "pieces" and some is not None:
        return empty_rows(stored.size, dtype, some)
    return torch.empty(stored.size, dtype=dtype)


def _join(found: dict[tuple[Any, ...], Any], rest: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in found.items():
        at: Any = nested
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = value
    pieces = nested.pop("pieces", {})
    checkpoint = _unmark(rest, pieces) if pieces else dict(rest)
    for key in _MODEL_KEYS:
        if key in nested:
            checkpoint["state_dict"] = nested.pop(key)
    states: list[dict[str, Any]] = []
    while (state := nested.pop(f"optimizer_{len(states)}", None)) is not None:
        groups = state.get("param_groups", {})
        in_order = [groups[i] for i in sorted(groups)] if isinstance(groups, dict) else groups
        states.append({"state": state.get("state", {}), "param_groups": in_order})
    if states:
        checkpoint["optimizer_states"] = states
    return checkpoint | nested


def _unmark(tree: Any, pieces: Mapping[str, Any]) -> Any:
    if isinstance(tree, str) and tree.startswith(_MARK):
        return pieces[tree.removeprefix(_MARK)]
    if isinstance(tree, Mapping):
        return {k: _unmark(v, pieces) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_unmark(v, pieces) for v in tree)
    return tree
