"""Optimizer state by parameter name, as directories hold it, and by parameter number, as PyTorch's files do."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_liger.parallel.pieces import piece_of, plain_name

# How a step is computed on this machine, not what it computes.
_IMPLEMENTATION = ("foreach", "fused", "capturable")


def parameter_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """The plain names of the optimizer's parameters in the order in which it numbers them."""
    names = {id(p): plain_name(name) for name, p in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(p), f"unnamed_parameter_{i}") for i, p in enumerate(parameters)]


def by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An ``Optimizer.state_dict()`` with names in place of numbers."""
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[i]: dict(entry) for i, entry in state["state"].items()}, "param_groups": groups}


def by_number(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A state that goes by names, with the numbers that ``names`` has for them.

    Raises:
        ValueError: the state is of parameters that the optimizer does not have.
    """
    numbers = {name: i for i, name in enumerate(names)}
    known = [plain_name(str(n)) for group in state["param_groups"] for n in group["params"]]
    strange = [n for n in known if n not in numbers]
    if strange:
        raise ValueError(
            f"The checkpoint holds optimizer state for {strange[0]!r}"
            + (f" and {len(strange) - 1} more parameters that" if strange[1:] else ", which")
            + " this optimizer does not have. Build the optimizer over the same parameters as in the run that saved it,"
            " or start from the weights alone."
        )
    # a model whose parameters changed places numbers them anew
    groups = [{**g, "params": sorted(numbers[plain_name(str(n))] for n in g["params"])} for g in state["param_groups"]]
    return {
        "state": {numbers[plain_name(str(n))]: entry for n, entry in state["state"].items()},
        "param_groups": groups,
    }


def goes_by_name(state: dict[str, Any]) -> bool:
    """Whether the state refers to parameters by name."""
    return any(isinstance(n, str) for group in state["param_groups"] for n in group["params"])


def is_ordinary(state: dict[str, Any]) -> bool:
    """Whether a ``state_dict()`` is laid out as that of :class:`torch.optim.Optimizer`."""
    groups = state.get("param_groups")
    return isinstance(state.get("state"), dict) and isinstance(groups, list) and all("params" in g for g in groups)


def load(module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state from a file or a directory, whole tensors or pieces, into the optimizer of a sharded module.

    Raises:
        ValueError: it is of other parameters, or holds objects whose insides belong to the shards of the run that saved it.
    """
    if not is_ordinary(state):
        optimizer.load_state_dict(state)
        return
    _check_values(optimizer, state)
    if goes_by_name(state):
        state = by_number(state, parameter_names(module, optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    _check_groups(optimizer, state)
    # numbers count the parameters as the saved groups list them
    numbered = [n for group in state["param_groups"] for n in group["params"]]
    owners = dict(zip(numbered, parameters, strict=True))
    cut = {n: {k: _cut(v, owners[n]) for k, v in entry.items()} for n, entry in state["state"].items()}
    groups = []
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**saved, **{k: own[k] for k in _IMPLEMENTATION if k in saved and k in own}})
    optimizer.load_state_dict({"state": cut, "param_groups": groups})


def _cut(value: Any, owner: Tensor) -> Any:
    if not isinstance(owner, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return piece_of(value, owner) if value.shape == owner.shape else value


def _check_groups(optimizer: Optimizer, state: dict[str, Any]) -> None:
    saved = [len(g["params"]) for g in state["param_groups"]]
    own = [len(g["params"]) for g in optimizer.param_groups]
    if saved != own:
        raise ValueError(
            f"The checkpoint's {type(optimizer).__name__} has parameter groups of {saved} parameters, this one of {own}."
            " Build the optimizer as in the run that saved it, or start from the weights alone."
        )


def _check_values(optimizer: Optimizer, state: dict[str, Any]) -> None:
    values = [(k, v) for entry in state["state"].values() for k, v in entry.items()]
    for name, value in values:
        if not isinstance(value, (Tensor, int, float, str, bytes, list, tuple, dict, type(None))):
            raise ValueError(
                f"The state of {type(optimizer).__name__} holds a {type(value).__name__} ({name!r}), made for shards of the"
                " run that saved it: its training cannot be resumed under liger_fsdp. Start from the weights alone"
                " (load_from_checkpoint, then fit without ckpt_path), or train with strategy='ddp'."
            )


def numbered(state: dict[str, Any]) -> dict[str, Any]:
    """A state by names as ``Optimizer.state_dict()`` numbers it: in the order of the groups."""
    if not goes_by_name(state):
        return state
    names = [str(n) for group in state["param_groups"] for n in group["params"]]
    return by_number(state, [plain_name(n) for n in names])
