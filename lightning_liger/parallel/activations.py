"""What autograd keeps for backward, counted without computing anything.

The decoder stack runs once on the ``meta`` device, where tensors have shapes and no memory, and what its operators save
for backward is added up. That holds for any architecture, and for adapters and frozen parts. Where a model does not run
on ``meta``, or is none of transformers', its linear layers are added up instead, in the manner of Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.parallel.meta_run import run_on_meta
from lightning_liger.parallel.offloading import BLOCKS_ON_DEVICE
from lightning_liger.parallel.selecting import Product, Selection, levels


@dataclass(frozen=True)
class Activations:
    """Bytes on one device for one micro-batch.

    Attributes:
        blocks: how many blocks keep something.
        block: what one block keeps for backward without checkpointing.
        entry: hidden states at a block's entry.
        attention: what attention gives in one block.
        products: one block's matrix products whose results backward needs.
        outside: what is kept outside of the blocks, without the head and the loss.
        backward: the most that one block's backward holds beside what was kept, with gradients of parameters.
        tokens: positions that all of it is for.
        counted: False for an estimate from the linear layers alone.
    """

    blocks: int = 0
    block: int = 0
    entry: int = 0
    attention: int = 0
    products: tuple[Product, ...] = ()
    outside: int = 0
    backward: int = 0
    tokens: int = 1
    counted: bool = True

    @property
    def entries(self) -> int:
        """What full checkpointing keeps."""
        return self.blocks * self.entry + self.outside

    def selection(self, room: int) -> Selection:
        """What selective checkpointing keeps besides the entries, where there is ``room`` for it."""
        if not self.counted or not self.blocks:
            return Selection()
        choices = levels(self.attention, self.products, self.block - self.entry)
        return Selection(choices, self.blocks, self.tokens, max(room, 0))

    def kept(self, mode: str, selection: Selection) -> int:
        """Bytes that wait for backward when the last block has run."""
        if mode == "none":
            return self.blocks * self.block + self.outside
        if mode == "full":
            return self.entries
        if not selection.blocks:
            every_second = sum(p.bytes for p in self.products if p.index % 2 == 0)
            return self.entries + self.blocks * (self.attention + every_second)
        return self.entries + selection.kept(self.tokens)

    def on_host(self, mode: str) -> int:
        """Bytes that wait in host memory where blocks' activations are offloaded."""
        return max(self.blocks - BLOCKS_ON_DEVICE, 0) * (self.block if mode == "none" else self.entry)

    def computed_again(self, mode: str, selection: Selection) -> int:
        """Bytes that the last block's second run adds to what it has kept."""
        if mode == "none" or not self.blocks:
            return 0
        if mode == "full":
            return max(self.block - self.entry, 0)
        last = selection.level(self.blocks - 1, self.tokens).bytes if selection.blocks else self.attention
        return max(self.block - self.entry - last, 0)

    def scaled(self, factor: float) -> Activations:
        names = ("block", "entry", "attention", "outside", "backward", "tokens")
        products = tuple(replace(p, bytes=round(p.bytes * factor)) for p in self.products)
        return replace(self, products=products, **{n: round(getattr(self, n) * factor) for n in names})


def count_activations(
    backbone: Any,
    blocks: Sequence[nn.Module],
    shape: tuple[int, int],
    dtype: torch.dtype | None,
    recomputed: bool = False,
) -> Activations:
    """Count for a call of ``backbone`` with token ids of ``shape``.

    Attention is counted as fused kernels keep it: queries, keys, values, output, one fp32 number for each row and head;
    for padded batches of models that attend eagerly, as it is. Triton kernels of norms and gated MLPs that are bound to
    the model's layers are counted as what they keep; those of other layers as the layers they replace.

    Args:
        backbone: a transformers model without head, sharded or not.
        blocks: its blocks, those that are checkpointed.
        shape: ``(1, T)`` for packed calls, ``(B, S)`` for padded ones.
        dtype: what parameters take part in; None for what they are stored in.
        recomputed: blocks are fully checkpointed, which decides whether long calls of their MLPs run in chunks.
    """
    try:
        run = run_on_meta(backbone, blocks, shape, dtype, recomputed)
    except Exception:
        # whatever a model's forward may raise on meta: data-dependent control flow, kernels without meta implementation
        return from_linear_layers(blocks, shape[0] * shape[1], dtype)
    active = [n for n in run.each if n > 0]
    return Activations(
        blocks=len(active),
        block=sum(active) // max(len(active), 1),
        entry=run.entry,
        attention=run.attention // max(len(run.each), 1),
        products=tuple(run.products),
        outside=max(run.saved - sum(run.each), 0),
        backward=run.backward,
        tokens=shape[0] * shape[1],
    )


def sum_of(found: Sequence[Activations]) -> Activations:
    """Of several backbones together; a block is the mean of all, with the products of the largest."""
    if len(found) == 1:
        return found[0]
    blocks = max(sum(a.blocks for a in found), 1)
    largest = max(found, key=lambda a: a.block)

    def mean(name: str) -> int:
        return sum(int(getattr(a, name)) * a.blocks for a in found) // blocks

    return Activations(
        blocks=sum(a.blocks for a in found),
        block=mean("block"),
        entry=mean("entry"),
        attention=mean("attention"),
        products=largest.products,
        outside=sum(a.outside for a in found),
        backward=largest.backward,
        tokens=largest.tokens,
        counted=all(a.counted for a in found),
    )


def from_linear_layers(blocks: Sequence[nn.Module], tokens: int, dtype: torch.dtype | None) -> Activations:
    """Each linear layer keeps its input, and its output is kept by what follows it; both for every token.

    A lower estimate: norms, activation functions in several steps, and scores keep more.
    """
    size = (dtype or torch.float32).itemsize
    shapes: list[list[tuple[int, int]]] = [
        [_shape(m) for m in block.modules() if _multiplies(m) and any(p.requires_grad for p in m.parameters())]
        for block in blocks
    ]
    active = [each for each in shapes if each]
    if not active:
        return Activations(counted=False)
    scale = tokens * size
    width = sum(sum(map(sum, each)) for each in active) // len(active)
    products = tuple(Product(i, out * scale, into) for i, (out, into) in enumerate(active[0]))
    return Activations(
        blocks=len(active),
        block=width * scale,
        entry=active[0][0][1] * scale,
        products=products,
        tokens=tokens,
        counted=False,
    )


def _shape(module: Any) -> tuple[int, int]:
    return module.weight.shape[0], module.weight.shape[1]


def _multiplies(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)
