"""Checkpoints as one file: an ordinary Lightning checkpoint, which loads without this package."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_liger.parallel.pieces import gather


def assemble(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint`` with whole tensors on the CPU of rank 0; elsewhere ``None`` in their place. All ranks call it.

    One tensor is whole on every device at a time. A tensor that appears twice (tied weights) stays one. Nothing in the
    result is changed by the steps that follow, so it can be written while training goes on.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    made: dict[int, Any] = {}

    def settle(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in made:
                made[id(value)] = _whole(value, first)
            return made[id(value)]
        if isinstance(value, dict):
            copied = copy.copy(value)
            for key, inner in value.items():
                copied[key] = settle(inner)
            return copied
        if type(value) in (list, tuple):
            return type(value)(settle(inner) for inner in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(settle, value))
        return value

    return {key: settle(value) for key, value in checkpoint.items()}


def _whole(value: Tensor, keep: bool) -> Tensor | None:
    if isinstance(value, DTensor):
        return gather(value, keep)
    if value.is_meta or not keep:
        return value if keep else None
    return value.detach().to("cpu", copy=True)


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


def available_bytes() -> int | None:
    """Host memory that is free for use, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None
