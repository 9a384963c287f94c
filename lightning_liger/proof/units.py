"""The modules whose calls are made again in the equivalence proof: as small as what was accelerated allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn

from lightning_liger.patching import Binding, Rebound, Switch
from lightning_liger.proof.requested import clean
from lightning_liger.proof.tape import Tape

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Unit(Rebound):
    """``forward`` of a unit, written down on a tape."""

    def __init__(self, module: nn.Module, switch: Switch, path: str, tape: Tape) -> None:
        super().__init__(module, switch)
        self.path = path
        self.tape: Tape | None = tape

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # not the switch of the others: a call on the original code is a call as well
        return self.original(*args, **kwargs) if self.tape is None else self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        assert self.tape is not None
        return self.tape.call_unit(self, self.original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rebound:
        tape, self.tape = self.tape, None
        try:
            return super().__deepcopy__(memo)
        finally:
            self.tape = tape


class CaughtLoss(Rebound):
    """``training_step`` of a module, whose output is shown to ``catch``: DDP sends it through a function of its own."""

    name = "training_step"

    def __init__(self, module: nn.Module, switch: Switch, catch: Callable[[Any], None]) -> None:
        super().__init__(module, switch)
        self.catch: Callable[[Any], None] | None = catch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.original(*args, **kwargs)
        if self.catch is not None:
            self.catch(output)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Rebound:
        catch, self.catch = self.catch, None
        try:
            return super().__deepcopy__(memo)
        finally:
            self.catch = catch


def find_units(root: nn.Module, bindings: list[Binding]) -> dict[nn.Module, str]:
    """Backbones and decoders, heads, and for whatever is bound outside of these the module of the user's that holds it."""
    paths = {module: clean(path) for path, module in root.named_modules()}
    bound = [(m, b.feature) for b in bindings if (m := b.module()) is not None and b.feature and m in paths]
    units = {m: paths[m] for m, feature in bound if feature == "padding" or (feature == "head+loss" and m is not root)}
    covered = {inner for unit in units for inner in unit.modules()}
    for module, _ in bound:
        if module in covered:
            continue
        holder = _holder(root, module)
        if holder is None:
            continue
        units[holder] = paths[holder]
        covered.update(holder.modules())
    return units


def _holder(root: nn.Module, module: nn.Module) -> nn.Module | None:
    """The outermost module below ``root`` that holds ``module`` and has a forward of its own."""
    if module is root:
        return None
    level: list[nn.Module] = list(root.children())
    while level:
        holder = next((m for m in level if any(inner is module for inner in m.modules())), None)
        if holder is None or not isinstance(holder, _CONTAINERS):
            return holder
        level = list(holder.children())
    return None
