"""A handful of shapes: batches of like size are lengthened, with filler that nobody reads, to one and the same.

Compiled layers are made again, and CUDA graphs recorded again, for each new shape. The shape of a packed batch is
three numbers, ``layout.size`` tokens in ``len(layout.documents)`` documents of ``layout.longest`` tokens at most; all
that a backbone, its layers and its attention are handed follows from them:

* hidden states ``(1, size, H)``, ``position_ids`` ``(1, size)``;
* ``cu_seq_lens_q`` and ``cu_seq_lens_k``: int32 ``(documents + 1,)``, never with an empty document;
* ``max_length_q`` and ``max_length_k``: the Python int ``longest``.

Where :attr:`ShapeBuckets.on` is true, every packed call has such a shape, batches without padding included. Whoever
compiles layers or records graphs after ``accelerate()`` calls :meth:`ShapeBuckets.turn_on_if_auto`, and whoever
records kernels finds the layout in ``packed_call.layout`` among the keywords of each layer: equal
``layout.shape_key`` means equal shapes, and the values to copy into a recorded graph's own tensors are
``layout.on(device).cu_seqlens``. A backbone
where filler would be noticed (:func:`notices_filler`) keeps its shapes; the report says why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.nn as nn

from lightning_liger.padding.layout import Layout

_TILE = 128  # rows of a block of a matrix product
_SMALLEST = 256
_LEAST_ROOM = 512
_FEWEST = 8
# places for tokens in a kernel's grid, documents times the longest, that it may skip: per token, and in any case
_SKIPPED, _SKIPPED_ANYWAY = 8, 65536

Shape = tuple[int, int, int]  # tokens, documents, the longest of them
_COUNTS_ROWS = re.compile(r"moe|expert|router", re.IGNORECASE)
# whose hooks move weights about, and read no rows
_LIBRARIES = ("torch", "lightning_liger", "transformers", "deepspeed", "accelerate", "peft")


def is_compiled_inside(backbone: nn.Module) -> bool:
    """Whether a layer of the backbone runs compiled."""
    return any(
        getattr(m, "_compiled_call_impl", None) is not None or type(m).__name__ == "OptimizedModule"
        for m in backbone.modules()
    )


class ShapeBuckets:
    """Which shape a packed batch is lengthened to; one object for all backbones of a training.

    Args:
        choice: the ``shape_buckets`` option.

    Attributes:
        on: whether batches are lengthened.
        budget: tokens that full batches hold, where that is known: they then need next to no filler.
    """

    def __init__(self, choice: bool | str | Sequence[int]) -> None:
        self.choice = choice
        self.sizes: tuple[int, ...] = () if isinstance(choice, (bool, str)) else tuple(choice)
        self.on = choice not in (False, "auto")
        self.budget: int | None = None
        self._met: dict[int, list[Shape]] = {}

    def turn_on_if_auto(self) -> None:
        """Layers are compiled, or recorded: shapes matter. What the user has chosen stays."""
        self.on = self.on or self.choice == "auto"

    def lengthened(self, layout: Layout) -> Layout:
        """``layout`` in the shape of its bucket."""
        if layout.filler:
            return layout
        if self not in layout.derived:
            layout.derived[self] = layout.lengthened(*self._met_before(layout, self.shape_of(layout)))
        found: Layout = layout.derived[self]
        return found

    def shape_of(self, layout: Layout) -> Shape:
        """The smallest shape for a batch."""
        room = max(_LEAST_ROOM, _power_of_two(max(layout.lengths)))
        documents = max(_FEWEST, _power_of_two(len(layout.lengths) + 1))
        while True:
            size = self.size_of(layout.tokens + documents - len(layout.lengths))
            if size - layout.tokens <= (documents - len(layout.lengths)) * room:
                return size, documents, room
            documents *= 2

    def _met_before(self, layout: Layout, shape: Shape) -> Shape:
        """A shape of the same size that was met before and has room for this one, or one with room for both.

        Results depend on the size alone: more documents and a longer one are work that a kernel skips, while there is
        not too much of it.
        """
        size, *_ = shape
        most = len(layout.lengths) + size - layout.tokens
        for known in sorted(self._met.setdefault(size, []), key=lambda s: s[1] * s[2]):
            joint = size, max(known[1], shape[1]), max(known[2], shape[2])
            if joint[1] <= most and joint[1] * joint[2] <= max(_SKIPPED * size, _SKIPPED_ANYWAY):
                shape = joint
                break
        if shape not in self._met[size]:
            self._met[size].append(shape)
        return shape

    def size_of(self, tokens: int) -> int:
        """``tokens`` rounded up: to a size that the user named, a share of the budget, or eight sizes per octave."""
        if self.sizes:
            return min((s for s in self.sizes if s >= tokens), default=_multiple(tokens, max(self.sizes)))
        if self.budget is not None:
            # a full batch and one document of filler: not an eighth more
            full = _multiple(self.budget + _TILE, _TILE)
            if tokens <= full:
                step = max(_SMALLEST, _multiple(self.budget / 8, _TILE))
                size = _multiple(tokens, step)
                return size if size <= full - step else full
        step = max(_SMALLEST, _power_of_two(tokens) // 16)
        return _multiple(tokens, step)


OFF = ShapeBuckets(False)


def divisible(layout: Layout, parts: int) -> Layout:
    """``layout``, with a document of filler behind it where its tokens cannot be divided by ``parts``."""
    missing = -layout.size % parts
    if not missing:
        return layout
    key = "divisible", parts
    if key not in layout.derived:
        documents = len(layout.documents)
        layout.derived[key] = layout.lengthened(layout.size + missing, documents + 1, max(layout.longest, missing))
    found: Layout = layout.derived[key]
    return found


def _power_of_two(number: int) -> int:
    """Not below ``number``."""
    return 1 << (number - 1).bit_length()


def _multiple(number: float, of: int) -> int:
    """The smallest multiple that is not below ``number``."""
    return int(-(-number // of)) * of


def notices_filler(backbone: nn.Module) -> str:
    """Why filler would not go unnoticed in this backbone, or ``""``."""
    for name, part in backbone.named_modules():
        kind = type(part).__name__
        if _COUNTS_ROWS.search(kind):
            return f"{kind} counts the tokens that it routes"
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            return f"{kind} takes the mean over all rows"
        if foreign_hook(part):
            return f"a forward hook on {name or kind} would see filler"
    return ""


def foreign_hook(module: nn.Module) -> bool:
    """Whether the user's code hangs on what goes in or comes out of ``module``."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    owners = (getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks)
    return any(owner.split(".")[0] not in _LIBRARIES for owner in owners)
