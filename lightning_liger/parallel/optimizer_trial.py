"""Whether an optimizer can update sharded parameters, asked before training instead of at its first step.

Under FSDP2 parameters, gradients and an optimizer's state are ``DTensor``s. PyTorch's operators know what to do with
them, and so does every optimizer that is written in those operators, whether it updates single elements (Adam,
schedule-free ones) or whole matrices (Muon, GaLore). Compiled operators of other packages and some in-place forms do not.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

_KNOWN = (Adam, AdamW, SGD)
_SIDE = 4  # of the local piece of a trial parameter
# how PyTorch says that it has no sharded form of an operation
_SAYS = ("DTensor", "sharding", "placement")


def check_takes_shards(optimizer: Optimizer) -> None:
    """Let a copy of ``optimizer`` take a step on tiny parameters that are sharded as its own are. A collective.

    Raises:
        ValueError: it cannot, with PyTorch's reason.
    """
    if type(optimizer) in _KNOWN:
        return
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)  # copy.copy() makes the few attributes that a checkpoint needs
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": _like(group["params"])} for group in optimizer.param_groups]
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    if not any(group["params"] for group in trial.param_groups):
        return
    try:
        # the class's: schedulers put a counter in front of the instance's
        type(optimizer).step(trial)
    except Exception as error:
        if any(word in f"{type(error).__name__}: {error}" for word in _SAYS):
            raise ValueError(_refusal(optimizer, error)) from error
        # an optimizer that wants something else first, such as a closure or a mode, will say so in its first step


def _like(parameters: list[Any]) -> list[torch.nn.Parameter]:
    """One tiny parameter, with a gradient, of each number of dimensions among ``parameters`` that are sharded."""
    made: dict[int, torch.nn.Parameter] = {}
    for p in parameters:
        if not isinstance(p, DTensor) or p.ndim in made or not p.is_floating_point():
            continue
        values = torch.linspace(-1.0, 1.0, _SIDE**p.ndim, device=p.to_local().device).view((_SIDE,) * p.ndim)
        mesh, placements, local = p.device_mesh, p.placements, values.to(p.dtype)
        trial = torch.nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))
        trial.grad = DTensor.from_local(local.flip(0), mesh, placements, run_check=False)
        made[p.ndim] = trial
    return list(made.values())


def _refusal(optimizer: Optimizer, error: Exception) -> str:
    kind = type(optimizer)
    reason = str(error).strip().split("\n")[0]
    return (
        f"{kind.__module__}.{kind.__name__} cannot update parameters that liger_fsdp has sharded (DTensors): {reason} "
        "Use an optimizer that is written in PyTorch's own operators, such as torch.optim.AdamW, whose state liger_fsdp "
        "shards over all ranks (and keeps in host memory with offload=True), or keep this one with strategy='ddp'."
    )
