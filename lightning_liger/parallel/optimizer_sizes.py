"""Bytes that optimizers will keep, told by their class before they have stepped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_liger.optim.taking import state_bytes

# class name, lower-cased -> state tensors of a parameter's own size and dtype
_STATES = {
    "adam": 2, "adamw": 2, "adamax": 2, "nadam": 2, "radam": 2, "adadelta": 2, "adagrad": 1, "asgd": 1, "rmsprop": 1,
    "rprop": 2, "lion": 1, "muon": 1, "adafactor": 0, "sgd": 0, "lamb": 2, "fusedadam": 2, "cpuadam": 2,
}  # fmt: skip


def state_factor(optimizer: Any) -> tuple[float, bool]:
    """Size of an optimizer's state beside its parameters'; and whether its class is known (two tensors are assumed)."""
    name = type(optimizer).__name__.lower()
    options: dict[str, Any] = optimizer.param_groups[0] if optimizer.param_groups else {}
    if "8bit" in name:
        return 0.5, True  # two bytes beside four
    known = _STATES.get(name)
    if known is None:
        return 2.0, False
    extra = {"adam": "amsgrad", "adamw": "amsgrad", "sgd": "momentum"}.get(name)
    more = bool(extra and options.get(extra))
    if name == "rmsprop":
        return known + bool(options.get("momentum")) + bool(options.get("centered")), True
    return known + more, True


def optimizer_bytes(optimizers: Sequence[Any]) -> tuple[int, int, list[str]]:
    """``(state, temporaries of a step, unknown classes)`` on this rank."""
    from torch.distributed.tensor import DTensor

    state = temporaries = 0
    unknown = []
    for optimizer in optimizers:
        ours = state_bytes(optimizer)
        if ours is not None:
            state += ours
            continue
        factor, known = state_factor(optimizer)
        sizes = [
            (p.to_local() if isinstance(p, DTensor) else p).nbytes for g in optimizer.param_groups for p in g["params"]
        ]
        state += round(factor * sum(sizes))
        fused = any(g.get("fused") for g in optimizer.param_groups)
        one_by_one = any(g.get("foreach") is False for g in optimizer.param_groups)
        if factor and not fused:
            temporaries += max(sizes, default=0) if one_by_one else sum(sizes)
        if not known:
            unknown.append(type(optimizer).__name__)
    return state, temporaries, unknown
