"""Attention over tokens that are divided among ranks: heads are exchanged for tokens, and back.

DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509, section 3): each of ``k`` ranks has all heads of ``T / k`` tokens.
An all-to-all before attention gives it ``1 / k`` of the heads for all ``T`` tokens, so that any kernel computes
attention as it would on one rank, with the boundaries of all documents; another one behind it restores all heads of its
own tokens. Both move ``1 / k`` of what attention reads and writes, whatever ``k`` is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_liger.parallel.exchanges import exchange
from lightning_liger.sequence import SequenceGroup


def repeats(heads: int, kv_heads: int, ranks: int) -> int | None:
    """How often each key and value head must be there for the heads of attention to be divided; None if they cannot.

    Fewer key and value heads than ranks, or a number of them that ``ranks`` does not divide, are repeated: a rank then
    has those that its own query heads attend with.
    """
    times = ranks // math.gcd(kv_heads, ranks)
    return times if heads % (kv_heads * times) == 0 else None


def heads_for_tokens(
    query: Tensor, key: Tensor, value: Tensor, ranks: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads, for all heads of this rank's tokens.

    Args:
        query: ``(1, heads, T / k, size)``; ``key``: ``(1, kv_heads, T / k, size)``; ``value`` may have a size of its own.
        ranks: how many there are, ``k``. group: name of their process group.

    Returns:
        ``(1, heads / k, T, size)``, and likewise for keys and values. They are views of one tensor, token by token.

    Raises:
        ValueError: the heads cannot be divided, see :func:`repeats`.
    """
    times = repeats(query.shape[1], key.shape[1], ranks)
    if times is None:
        raise ValueError(
            f"{query.shape[1]} attention heads, with {key.shape[1]} of keys and values, cannot be divided among {ranks} "
            "ranks"
        )
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    # one message for all three: (tokens, heads, size) by token, the heads of each rank side by side
    parts = [t[0].transpose(0, 1).unflatten(1, (ranks, -1)).flatten(2) for t in (query, key, value)]
    together = exchange(torch.cat(parts, -1).transpose(0, 1).contiguous(), group).flatten(0, 1)
    found = together.split([p.shape[-1] for p in parts], -1)
    q, k, v = (
        part.unflatten(-1, (-1, t.shape[-1])).transpose(0, 1)[None]
        for part, t in zip(found, (query, key, value), strict=True)
    )
    return q, k, v


def tokens_for_heads(output: Tensor, ranks: int, group: str) -> Tensor:
    """All heads of this rank's tokens, for all tokens of its heads.

    Args:
        output: ``(T, heads / k, size)``.

    Returns:
        ``(T / k, heads, size)``.
    """
    parts = output.flatten(1).unflatten(0, (ranks, -1))
    exchanged = exchange(parts.contiguous(), group).transpose(0, 1)
    return exchanged.unflatten(-1, (output.shape[1], output.shape[2])).flatten(1, 2)


def own_heads(tensor: Tensor, heads: int, ranks: int, rank: int) -> Tensor:
    """Of one number for each head, ``(heads,)``, those of this rank."""
    each = heads // ranks
    return tensor[rank * each : (rank + 1) * each]


class OwnHeads:
    """An attention layer as the attention function of its model sees it: with this rank's heads alone.

    Args:
        module: the layer. heads, kv_heads: of the layer, and of keys and values on this rank.
    """

    def __init__(self, module: Any, heads: int, kv_heads: int, sequence: SequenceGroup) -> None:
        self._module = module
        self._heads = heads
        self._sequence = sequence
        self.num_key_value_groups = heads // sequence.size // kv_heads

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, torch.nn.Parameter) and found.shape == (self._heads,):
            return own_heads(found, self._heads, self._sequence.size, self._sequence.rank)
        return found
