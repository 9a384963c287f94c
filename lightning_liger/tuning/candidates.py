"""What is timed for one block, and under which key a decision holds for a later run."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn

from lightning_liger.compilation.block import CompiledBlock, Graphs
from lightning_liger.compilation.inner_hooks import foreign_hook, without_inner_hooks
from lightning_liger.compilation.recorded import RecordedBlock, RecordedStack
from lightning_liger.device_memory import free_bytes
from lightning_liger.kernels.apply import why_auto_is_off
from lightning_liger.kernels.registry import KernelBinding
from lightning_liger.padding.attention import PackedCall, packed_call_of
from lightning_liger.padding.backbones import attention_layers
from lightning_liger.patching import Switch, bindings_of
from lightning_liger.report import PaddingReport
from lightning_liger.tuning.decision import Decision, Plan, fastest
from lightning_liger.tuning.timing import Trial, measure, untouched

_SECONDS = 14.0  # after which no further candidate is compiled; one compilation takes about ten
_PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "flash-attn", "flash-attn-4", "peft", "lightning-liger")


@dataclass(frozen=True)
class Options:
    """What may be chosen.

    Attributes:
        ops: kernels whose use is open.
        compile: whether compiled blocks are candidates.
        record: why recordings are none, or ``""``.
        graphs: what is compiled for the timing, and serves all blocks later.
    """

    ops: tuple[str, ...]
    compile: bool
    record: str
    graphs: Graphs


def without_timing(ops: set[str], backbone: nn.Module) -> Plan:
    """The rule of ``kernels="auto"``: by the width of the model."""
    return Plan() if why_auto_is_off(backbone) else Plan(tuple(sorted(ops)))


def key(backbone: Any, block: nn.Module, kwargs: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """All that a decision depends on, for JSON."""
    call = packed_call_of(dict(kwargs))
    device = next(block.parameters()).device
    kind = device.type
    return {
        "format": 1,
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else kind,
        "versions": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "block": type(block).__name__,
        "parts": sorted({type(m).__name__ for m in block.modules()}),
        "parameters": [(n, list(p.shape), str(p.dtype), p.requires_grad) for n, p in block.named_parameters()],
        "layers": getattr(backbone.config, "num_hidden_layers", None),
        "training": block.training,
        "recomputed": [type(b).__name__ for b in bindings_of(block)]
        + [bool(vars(block).get("gradient_checkpointing"))],
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "",
        "shape": None if call is None else list(call.layout.shape_key),
        "attention": None if call is None else [call.backend, call.attn_implementation],
        "options": [list(options.ops), options.compile, options.record],
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def decide(
    backbone: nn.Module, block: nn.Module, blocks: int, args: Any, kwargs: dict[str, Any], options: Options
) -> Decision:
    """Time the candidates on this block and these inputs, and take one for all ``blocks``.

    Raises:
        Exception: what the block itself raises when it is run once more.
    """
    call = packed_call_of(kwargs)
    if call is not None:
        kwargs = {**kwargs, "packed_call": _unreported(call)}
    trial = Trial(block, args, kwargs)
    kernels = [b for m in block.modules() for b in bindings_of(m) if isinstance(b, KernelBinding)]
    before = [(k, k.resting) for k in kernels]

    def use(ops: tuple[str, ...]) -> Callable[[], None]:
        def switch() -> None:
            for kernel in kernels:
                if kernel.op in options.ops:
                    kernel.resting = kernel.op not in ops

        return switch

    forward = block.forward
    ways: dict[Plan, tuple[Callable[[], None], Callable[..., Any]]] = {Plan(): (use(()), forward)}
    present = tuple(sorted({k.op for k in kernels} & set(options.ops)))
    if present:
        ways[Plan(present)] = (use(present), forward)
        if len(present) > 1:
            ways.update({Plan((op,)): (use((op,)), forward) for op in present})
    hooked = foreign_hook(block)
    stacks: list[RecordedStack] = []
    if not options.record and not hooked:
        for ops in dict.fromkeys(((), present)):
            ways[Plan(ops, False, True)] = (use(ops), _recorded(block, forward, stacks))
    if options.compile and not hooked:
        refused: list[str] = []
        graphs = options.graphs.on_trial(refused.append)
        attention = [m for m in attention_layers(backbone) if m in set(block.modules())]
        on_code = CompiledBlock(block, Switch(True), graphs, attention)
        run = _checked(on_code.call, refused)
        ways[Plan((), True)] = (use(()), run)
        if not options.record:
            ways[Plan((), True, True)] = (use(()), _recorded(block, run, stacks))
    try:
        with untouched(block, trial.device), nullcontext() if hooked else without_inner_hooks(block):
            costs = measure(trial, ways, Plan(), _SECONDS)
            union = tuple(op for op in present if costs[Plan((op,))].ms < costs[Plan()].ms) if len(present) > 1 else ()
            if len(union) > 1 and union != present:
                # kernels that win alone should win together; the plain block is timed again beside them
                again = measure(trial, {Plan(): ways[Plan()], Plan(union): (use(union), forward)}, Plan(), _SECONDS)
                scale = costs[Plan()].ms / again[Plan()].ms
                costs[Plan(union)] = replace(again[Plan(union)], ms=again[Plan(union)].ms * scale)
    finally:
        for kernel, resting in before:
            kernel.resting = resting
        for stack in stacks:  # cycles hold it: the rest of this step would find their memory taken
            stack.forget()
    for found in [p for p in costs if p.recorded]:
        # what a recording keeps is allocated before its forward begins
        costs[found] = replace(costs[found], kept=costs[replace(found, recorded=False)].kept)
    plan = fastest(costs, blocks, _free(trial.device))
    return Decision(
        plan,
        {p.name: round(c.ms, 4) for p, c in costs.items() if not c.problem},
        {p.name: c.problem for p, c in costs.items() if c.problem} | ({"compiled": hooked} if hooked else {}),
    )


def _recorded(block: nn.Module, run: Callable[..., Any], stacks: list[RecordedStack]) -> Callable[..., Any]:
    refused: list[str] = []
    stack = RecordedStack([block], 1, refused.append)
    stack.seen_before = 2
    stacks.append(stack)
    binding = RecordedBlock(block, Switch(True), stack)
    binding.previous = run
    return _checked(binding.call, refused)


def _checked(run: Callable[..., Any], refused: list[str]) -> Callable[..., Any]:
    """``run``, with an error once it is refused: the plain block must not be timed under another name."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if refused:
            raise RuntimeError(refused[0])
        return out

    return checked


def _unreported(call: PackedCall) -> PackedCall:
    return replace(call, chosen=dict(call.chosen), report=PaddingReport(""))


def _free(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 62
    return free_bytes(device)
