"""Save and load a sharded module with its optimizers: one file or a directory, now or in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_liger.parallel import files, optimizer_states, sharded, single
from lightning_liger.parallel.background import BackgroundSave
from lightning_liger.parallel.pieces import copy_with, on_cpu, plain_name
from lightning_liger.parallel.shard import reshard
from lightning_liger.parallel.together import is_first, together

StateDictType = Literal["full", "sharded"]
FROZEN_LEFT_OUT = "frozen_parameters_left_out"


def check_state_dict_type(value: object) -> None:
    """Raise for a ``state_dict_type`` that does not exist.

    Raises:
        ValueError: naming those that do.
    """
    if value not in get_args(StateDictType):
        raise ValueError(
            f"state_dict_type={value!r}: expected 'full' (one ordinary checkpoint file) or 'sharded' (a directory that"
            " every rank writes its part of)."
        )


def module_state(module: nn.Module, exclude_frozen: bool = False) -> dict[str, Any]:
    """``module.state_dict()`` in pieces; tied weights are one object under each of their names.

    Args:
        module: Any module, sharded or not.
        exclude_frozen: Leave out the parameters that do not train.
    """
    reshard(module)
    owners = {plain_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    shared: dict[int, Any] = {}
    made: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        owner = owners.get(plain_name(name))
        if owner is None:
            made[name] = value
        elif owner.requires_grad or not exclude_frozen:
            made[name] = shared.setdefault(id(owner), value)
    return made


def save(
    checkpoint: dict[str, Any],
    path: Path,
    kind: StateDictType,
    module: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    background: BackgroundSave | None = None,
) -> None:
    """Write a Lightning checkpoint in which tensors are in pieces. Every rank calls it with the same ``path``.

    Args:
        checkpoint: As ``Trainer`` dumps it: ``state_dict``, ``optimizer_states`` and anything else.
        path: A file for ``"full"``, a directory for ``"sharded"``. What is there is kept until the new one is whole.
        kind: ``"full"``: one ordinary file, which rank 0 assembles in host memory and writes. ``"sharded"``: a
            directory of :mod:`torch.distributed.checkpoint`, where each rank writes its own part.
        module: The sharded module that the checkpoint is of.
        optimizers: Those of ``checkpoint["optimizer_states"]``.
        background: Copy everything to host memory, return, and write while training goes on.

    Raises:
        RuntimeError: on every rank, when writing failed on one.
    """
    if kind == "full":
        whole = single.assemble(checkpoint, path.parent)
        if background is None:
            _place(path, lambda partial: single.write(whole, partial), None, first_only=True)
        else:
            group = background.group
            background.start(lambda: _place(path, lambda p: single.write(whole, p), group, first_only=True))
        return
    shared, rest = sharded.split(checkpoint, _by_name(module, optimizers, checkpoint.get("optimizer_states")))
    if background is None:
        _place(path, lambda partial: sharded.write(shared, rest, partial), None)
    else:
        staged = copy_with(shared, on_cpu)
        later = copy_with(rest, on_cpu)
        group = background.group
        background.start(lambda: _place(path, lambda p: sharded.write(staged, later, p, group), group))


def load(path: Path, module: nn.Module, optimizer_too: bool = True, weights_only: bool | None = None) -> dict[str, Any]:
    """A Lightning checkpoint for ``module``, from a file or a directory, saved on any number of ranks.

    Args:
        path: Where it is. Every rank reads its own part, so every rank has to see it.
        module: The module, sharded already.
        optimizer_too: Whether to read optimizer state from a directory.
        weights_only: As in :func:`torch.load`, for all but the tensors.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: what is there is no checkpoint.
    """
    path = files.existing(path)
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint not found: {path}")
    if path.is_file():
        return single.read(path, weights_only)
    if not sharded.is_sharded(path):
        raise ValueError(
            f"{path} is a directory, but not a checkpoint: it lacks {sharded.META} or .metadata."
            " Give the directory that was saved itself, or a single checkpoint file."
        )
    reshard(module)
    parameters = {plain_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    return sharded.read(path, parameters, lambda at: optimizer_too or not _is_optimizer(at), weights_only)


def load_module(module: nn.Module, checkpoint: Mapping[str, Any], strict: bool) -> None:
    """Load ``checkpoint["state_dict"]``, whole tensors or pieces, into ``module``.

    Names may differ by what wrappers add. Frozen parameters that the checkpoint left out on purpose keep their values.

    Raises:
        RuntimeError: as ``load_state_dict`` does, with ``strict``.
    """
    reshard(module)
    own = {plain_name(name): name for name in module.state_dict()}
    state = {own.get(plain_name(name), name): value for name, value in checkpoint["state_dict"].items()}
    if checkpoint.get(FROZEN_LEFT_OUT):
        frozen = {plain_name(n): p for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        for name, parameter in frozen.items():
            state.setdefault(own.get(name, name), parameter.detach())
    module.load_state_dict(state, strict=strict)


def _by_name(
    module: nn.Module, optimizers: Sequence[Optimizer], states: list[dict[str, Any]] | None
) -> list[dict[str, Any]] | None:
    if not states:
        return []
    if len(states) != len(optimizers) or not all(optimizer_states.is_ordinary(s) for s in states):
        return None
    named = zip(optimizers, states, strict=True)
    return [optimizer_states.by_name(s, optimizer_states.parameter_names(module, o)) for o, s in named]


def _is_optimizer(path: tuple[Any, ...]) -> bool:
    return str(path[0]).startswith("optimizer_")


def _place(
    path: Path, write: Callable[[Path], None], group: dist.ProcessGroup | None, first_only: bool = False
) -> None:
    """Write beside ``path``, then rename; either all ranks succeed or all raise, and what was there stays."""
    partial = files.partial_path(path)
    first = is_first()
    try:
        together((lambda: files.start(path)) if first else None, f"Making room for {path}", group)
        together((lambda: write(partial)) if first or not first_only else None, f"Saving {path}", group)
        together((lambda: files.publish(path)) if first else None, f"Renaming {partial} to {path}", group)
    except BaseException:
        if first:
            files.discard(partial)
        raise
