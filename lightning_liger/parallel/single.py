"""Checkpoints as one file: an ordinary Lightning checkpoint, which loads without this package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_liger.parallel.pieces import gather, pieces_in, replace_pieces


def assemble(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint`` with whole tensors on the CPU of rank 0; elsewhere ``None`` in their place. All ranks call it.

    One tensor is whole on every device at a time. A tensor that appears twice (tied weights) stays one.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    made: dict[int, Tensor | None] = {}

    def whole(piece: DTensor) -> Tensor | None:
        if id(piece) not in made:
            made[id(piece)] = gather(piece, keep=first)
        return made[id(piece)]

    assembled: dict[str, Any] = replace_pieces(checkpoint, whole)
    return assembled


def detach_from_training(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Copies of what the next step may change in place, so that it can be written while training goes on."""

    def settle(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True)
        if isinstance(value, dict):
            return {k: settle(v) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(settle(v) for v in value)
        return value

    settled: dict[str, Any] = settle(checkpoint)
    return settled


def write(checkpoint: dict[str, Any], path: Path) -> None:
    """Write one file, on disk when this returns."""
    with open(path, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint whose tensors stay in the file until they are used: each rank reads its own share of it."""
    with open(path, "rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"  # PyTorch's files before 1.6 cannot be mapped
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=mapped, weights_only=weights_only)
    return checkpoint


def bytes_of(tree: Any) -> int:
    """Size of all tensors in pieces, when whole."""
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in pieces_in(tree)}.values())
