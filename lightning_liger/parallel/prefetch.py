"""How many blocks are gathered ahead of the one that computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule


def set_prefetch(blocks: Sequence[nn.Module], depth: int) -> None:
    """Gather ``depth`` blocks ahead, in forward and in backward.

    FSDP by itself gathers one block ahead on a GPU, once the CPU has reached it. Asked for explicitly, the gathering is
    issued before the block computes, which helps when the CPU is late; two and more hide slow networks, and hold as many
    more whole blocks in memory.

    Args:
        blocks: sharded blocks in the order in which they run; blocks of different models may follow each other only
            where the models do.
        depth: 0 leaves FSDP's own behaviour.

    Raises:
        ValueError: a negative or fractional depth.
    """
    check_depth(depth)
    if depth == 0:
        return
    sharded: list[Any] = [b for b in blocks if isinstance(b, FSDPModule)]
    for i, block in enumerate(sharded):
        block.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + depth])
        block.set_modules_to_backward_prefetch(sharded[max(i - depth, 0) : i][::-1])


def check_depth(depth: int) -> None:
    """Raise for what is no number of blocks."""
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ValueError(f"prefetch={depth!r}: expected how many blocks to gather ahead, 0 or more.")


def lists_of(blocks: dict[str, nn.Module]) -> list[list[nn.Module]]:
    """Blocks grouped by the list that they stand in: those of one model run one after the other."""
    grouped: dict[str, list[nn.Module]] = {}
    for path, block in blocks.items():
        grouped.setdefault(path.rpartition(".")[0], []).append(block)
    return list(grouped.values())
