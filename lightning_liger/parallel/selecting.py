"""What selective checkpointing keeps of each block: as much as memory has room for, in the order of what it saves.

A matrix product ``(T, K) @ (K, N)`` takes ``2 T K N`` operations and gives ``2 T N`` bytes in bf16, so that a kept byte
saves ``K`` operations, whichever product it is: those with the most columns to add up come first. Attention comes before
all of them, because its kernels reach a fraction of a product's speed. Norms and activation functions are always computed
again, unless all is kept. Blocks that differ in what they keep cost no more than their sum, so the last blocks, whose
memory is free first in backward, take the next step before the others do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Product:
    """One matrix product of a block: its place among them, bytes of its result, and how many terms an entry sums."""

    index: int
    bytes: int
    depth: int


@dataclass(frozen=True)
class Level:
    """What one block keeps besides its input, and how many bytes that is.

    Attributes:
        attention: what attention gave. products: places of the matrix products whose results are kept; None for every
            second one. all: whatever autograd keeps, and nothing is computed again.
    """

    bytes: int = 0
    attention: bool = False
    products: frozenset[int] | None = frozenset()
    all: bool = False

    def keeps_product(self, index: int) -> bool:
        return index % 2 == 0 if self.products is None else index in self.products


# in a llama block: of query, key, value, output, gate, up and down, as torchtitan does; for blocks that nobody counted
EVERY_SECOND = Level(attention=True, products=None)


def levels(attention: int, products: Sequence[Product], whole: int) -> tuple[Level, ...]:
    """From nothing kept to all kept.

    Args:
        attention: bytes of what attention gives in one block. products: those whose results backward needs.
        whole: bytes that a block keeps without checkpointing, without its input.
    """
    made = [Level()]
    if attention:
        made.append(Level(attention, attention=True))
    kept: frozenset[int] = frozenset()
    size = attention
    for product in sorted(products, key=lambda p: (-p.depth, p.bytes, p.index)):
        kept, size = kept | {product.index}, size + product.bytes
        if size >= whole:
            break
        made.append(Level(size, bool(attention), kept))
    return (*made, Level(max(whole, made[-1].bytes), bool(attention), kept, all=True))


@dataclass(frozen=True)
class Selection:
    """Levels for the blocks of a model.

    Attributes:
        levels: cheapest first, for ``tokens`` tokens. blocks: how many take part. room: bytes for all of them together.
    """

    levels: tuple[Level, ...] = (EVERY_SECOND,)
    blocks: int = 0
    tokens: int = 1
    room: int = 0
    _made: dict[int, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)

    def level(self, position: int, tokens: int) -> Level:
        """For the block at ``position`` of the model in a call with ``tokens`` tokens."""
        base, more = self.split(tokens)
        return self.levels[base + (more > 0 and position >= self.blocks - more)]

    def split(self, tokens: int) -> tuple[int, int]:
        """The level of every block, and how many of the last ones take the next."""
        if len(self.levels) == 1 or not self.blocks:
            return len(self.levels) - 1, 0
        if tokens not in self._made:
            self._made[tokens] = self._split(tokens / self.tokens)
        return self._made[tokens]

    def _split(self, scale: float) -> tuple[int, int]:
        costs = [level.bytes * scale for level in self.levels]
        base = max((i for i, cost in enumerate(costs) if cost * self.blocks <= self.room), default=0)
        if base + 1 == len(costs):
            return base, 0
        left = self.room - costs[base] * self.blocks
        return base, max(0, min(self.blocks - 1, int(left // max(costs[base + 1] - costs[base], 1.0))))

    def kept(self, tokens: int) -> int:
        """Bytes that all blocks keep besides their inputs."""
        scale = tokens / self.tokens
        return round(scale * sum(self.level(i, tokens).bytes for i in range(self.blocks)))

    def describe(self, tokens: int) -> str:
        """For people: what is kept."""
        base, more = self.split(tokens)
        text = _name(self.levels[base])
        if more:
            text += f"; in the last {more} of {self.blocks} blocks {_name(self.levels[base + 1])}"
        return text


def _name(level: Level) -> str:
    if level.all:
        return "everything"
    if level.products is None:
        return "attention and every second product"
    parts = ["attention"] * level.attention
    if level.products:
        parts.append(f"{len(level.products)} matrix product{'s' * (len(level.products) > 1)}")
    return " and ".join(parts) or "nothing"
