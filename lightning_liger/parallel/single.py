"""Checkpoints as one file: an ordinary Lightning checkpoint, which loads without this package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_liger.parallel.host import Room, size_of
from lightning_liger.parallel.pieces import copy_with, gather, pieces_in
from lightning_liger.parallel.together import is_first


def assemble(checkpoint: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``checkpoint`` with whole tensors on the CPU of rank 0; elsewhere ``None`` in their place. All ranks call it.

    One tensor is whole on every device at a time. A tensor that appears twice (tied weights) stays one. Nothing in the
    result is changed by the steps that follow, so it can be written while training goes on.

    Args:
        checkpoint: With tensors in pieces.
        folder: Where rank 0 may put a temporary file when host memory does not suffice.
    """
    room = Room(size_of(pieces_in(checkpoint)), folder) if is_first() else None
    made: dict[int, Any] = {}

    def whole(value: Tensor) -> Tensor | None:
        if id(value) not in made:
            gathered = gather(value) if isinstance(value, DTensor) else value.detach()
            made[id(value)] = None if room is None else gathered if value.is_meta else room.keep(gathered)
        return made[id(value)]

    assembled: dict[str, Any] = copy_with(dict(checkpoint), whole)
    return assembled


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


def expected_bytes(module: nn.Module) -> int:
    """Size of a checkpoint file with the two moments that Adam keeps of every parameter that trains."""
    return sum(p.numel() * p.element_size() * (3 if p.requires_grad else 1) for p in module.parameters())
