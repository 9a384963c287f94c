"""Which ranks hold what of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_liger.optim.rounding import hashed


class Place(NamedTuple):
    """Where a parameter lies: its device, and the process groups that its pieces are spread over."""

    device: torch.device
    groups: tuple[Any, ...]


def local(tensor: Any) -> Tensor:
    """What this rank holds of it."""
    held: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    return held


def is_dense(tensor: Tensor) -> bool:
    """Whether its entries fill their memory without gaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether the same place in the memory of each is the same entry, and there is nothing between entries."""
    strides = {t.stride() for t in tensors}
    return all(t.is_contiguous() for t in tensors) or (len(strides) == 1 and is_dense(tensors[0]))


def place_of(parameter: Tensor) -> Place:
    if not isinstance(parameter, DTensor):
        return Place(parameter.device, ())
    mesh = parameter.device_mesh
    return Place(local(parameter).device, tuple(mesh.get_group(dimension) for dimension in _split(parameter)))


def noise_key(parameter: Tensor, number: int) -> int:
    """What the noise of the optimizer's ``number``-th parameter starts from: alike where ranks hold the same of it."""
    key = hashed(number + 1)
    if isinstance(parameter, DTensor):
        coordinates = parameter.device_mesh.get_coordinate() or ()
        for dimension in _split(parameter):
            key = hashed(key + 1 + coordinates[dimension])
    return key


def _split(parameter: DTensor) -> list[int]:
    """Dimensions of its mesh whose ranks hold different parts."""
    sizes = parameter.device_mesh.shape
    return [i for i, placement in enumerate(parameter.placements) if sizes[i] > 1 and not placement.is_replicate()]
