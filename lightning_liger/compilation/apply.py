"""Which blocks of a backbone are compiled and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn as nn

from lightning_liger.compilation.block import CompiledBlock, Graphs
from lightning_liger.compilation.recorded import RecordedBlock, RecordedStack
from lightning_liger.padding.backbones import attention_layers
from lightning_liger.padding.padding_free import held_in_pieces
from lightning_liger.parallel.blocks import find_blocks
from lightning_liger.parallel.recompute import Recomputed
from lightning_liger.patching import Rebound, Switch, bindings_of


def stack_of(backbone: nn.Module) -> list[nn.Module]:
    """The blocks that a packed batch runs through one after the other: those with attention inside."""
    attention = set(attention_layers(backbone))
    return [block for block in find_blocks(backbone).values() if not attention.isdisjoint(block.modules())]


def why_not_recorded(backbone: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """Why CUDA graphs of these blocks would be wrong or in the way, or ``""``."""
    if any(p.device.type != "cuda" for block in blocks for p in block.parameters()):
        return "they are not on a CUDA device"
    if any(held_in_pieces(p) for p in backbone.parameters()):
        return "parameters are gathered anew for each step, at other places"
    for block in blocks:
        if vars(block).get("gradient_checkpointing") or any(isinstance(b, Recomputed) for b in bindings_of(block)):
            return "activations are recomputed in backward"
        if block._forward_hooks or block._backward_hooks:
            return "a hook could keep what a block gives back"
    return ""


def compiled(blocks: Sequence[nn.Module], backbone: nn.Module, switch: Switch, graphs: Graphs) -> list[Rebound]:
    """Bindings, not bound yet."""
    attention = set(attention_layers(backbone))
    return [CompiledBlock(b, switch, graphs, [m for m in b.modules() if m in attention]) for b in blocks]


def recorded(
    blocks: Sequence[nn.Module],
    switch: Switch,
    limit: int,
    refuse: Callable[[str], None],
    ready: Callable[[int], bool] = lambda size: True,
    seen_before: int = 2,
) -> list[Rebound]:
    """Bindings, not bound yet; arguments as :class:`RecordedStack` has them."""
    stack = RecordedStack(blocks, limit, refuse)
    stack.ready, stack.seen_before = ready, seen_before
    return [RecordedBlock(block, switch, stack) for block in blocks]
