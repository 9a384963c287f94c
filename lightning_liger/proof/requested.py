"""Every replacement that was bound, and whether it did its work between two moments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn as nn

from lightning_liger.compilation.block import CompiledBlock
from lightning_liger.patching import Binding, Rebound, bindings_of
from lightning_liger.report import NO_PADDING, SHARDED_EVALUATION, Report

BLOCKS = CompiledBlock.feature
_RIGHTLY_PADDED = (NO_PADDING, SHARDED_EVALUATION)


@dataclass(frozen=True)
class Request:
    """One replacement on one module.

    Attributes:
        binding: None if it is gone already; ``runs``: how often it had run when the watch began.
    """

    path: str
    feature: str
    module: nn.Module
    binding: Rebound | None
    runs: int

    @property
    def launches(self) -> tuple[str, ...]:
        return () if self.binding is None else self.binding.launches

    def ran(self) -> bool:
        return self.binding is not None and self.binding.runs > self.runs


@dataclass(frozen=True)
class Finding:
    """``ran`` True, or the reason; ``idle``: there was nothing for it to do, so that nothing is wrong."""

    request: Request
    ran: bool
    reason: str = ""
    idle: bool = False


def requests(root: nn.Module, bindings: Iterable[Binding]) -> list[Request]:
    """What must be seen to run from now on, in the order of the modules."""
    paths = {module: clean(path) or type(module).__name__ for path, module in root.named_modules()}
    order = {module: i for i, module in enumerate(paths)}
    found = []
    for bound in bindings:
        module, binding = bound.module(), bound.binding()
        if binding is not None and binding.resting:
            continue  # another way to run is faster here, which the report says
        if bound.feature and module is not None and module in paths:
            if binding is not None:
                binding.called, binding.bypassed = False, ""
            runs = 0 if binding is None else binding.runs
            found.append(Request(paths[module], bound.feature, module, binding, runs))
    return sorted(found, key=lambda r: order[r.module])


def clean(path: str) -> str:
    """A module's path without what wrappers put into it."""
    wrappers = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
    return ".".join(part for part in path.split(".") if part not in wrappers)


def judge(asked: list[Request], report: Report, fused_calls: int) -> list[Finding]:
    """What became of each request.

    Args:
        fused_calls: losses through the head at the beginning of the watch.
    """
    asked = _one_of_each_block(asked)
    packed = [r.module for r in asked if r.feature == "padding" and r.ran()]
    in_packed = {m for backbone in packed for m in backbone.modules()}
    in_blocks = inside_blocks(r for r in asked if r.ran())
    made = []
    for request in asked:
        if request.feature == "attention" and request.module not in in_packed and not request.ran():
            continue  # attention is only ours where the padding is gone, which has a line of its own
        if request.module in in_blocks and request.feature != BLOCKS and not request.ran():
            continue  # its block ran as one piece, which is what was asked for
        made.append(_finding(request, report, fused_calls))
    return made


def inside_blocks(asked: Iterable[Request]) -> set[nn.Module]:
    """Blocks that are asked to run compiled or replayed, and all that is in them. A hook there would prevent that."""
    return {m for r in asked if r.feature == BLOCKS for m in r.module.modules()}


def _one_of_each_block(asked: list[Request]) -> list[Request]:
    """A compiled block may be replayed, or not: of both requests the one that ran, or else the more telling one."""
    best: dict[nn.Module, Request] = {}
    for request in asked:
        if request.feature == BLOCKS:
            known = best.get(request.module)
            best[request.module] = request if known is None else max(request, known, key=_tells)
    return [r for r in asked if r.feature != BLOCKS or best[r.module] is r]


def _tells(request: Request) -> tuple[bool, bool, bool]:
    """A replay does not call what is compiled; a block that waits to be recorded runs compiled meanwhile."""
    bound = request.binding
    return request.ran(), bound is not None and bound.called, bound is not None and not bound.waits


def _finding(request: Request, report: Report, fused_calls: int) -> Finding:
    binding, module = request.binding, request.module
    if request.ran():
        if request.feature != "head+loss" or report.head.fused_calls > fused_calls:
            return Finding(request, True)
        by = ", ".join(f"{op} ({site})" for op, site in report.head.materialised_by.items())
        why = f"logits were computed in full for {by}" if by else "no loss was computed through it"
        return Finding(request, False, why, idle=not by)
    if binding is None or not any(b is binding for b in bindings_of(module)):
        return Finding(request, False, f"its forward was replaced after it was accelerated, by {_owner(module)}")
    if not binding.switch.on:
        return Finding(request, False, "acceleration was switched off")
    if not binding.called:
        why = f"only called inside of {binding.bypassed}" if binding.bypassed else "not called in this step"
        return Finding(request, False, why, idle=True)
    if binding.why:
        return Finding(request, False, binding.why, idle=binding.why in _RIGHTLY_PADDED or binding.waits)
    return Finding(request, False, "its original code ran")


def _owner(module: nn.Module) -> str:
    forward = module.__dict__.get("forward")
    function = getattr(forward, "__func__", forward)
    if function is None:
        return f"{type(module).__name__}'s own"
    place = getattr(function, "__module__", None) or type(function).__module__
    return f"{place}.{getattr(function, '__qualname__', type(function).__name__)}"
