"""Passes of a sharded module beside those of its training: the batch that was just trained on, once more."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_liger.parallel.groups import (
    begin_as_root,
    compute_dtypes,
    finish_backward,
    is_gathered,
    noted_passes,
    parameters_of,
    put_gradients_aside,
    sharded_parts,
)


class Repeating:
    """Forward and backward passes that leave no gradient, and nothing gathered that was not.

    All ranks make the same passes. Inside, and after each backward, ``.grad`` of sharded parameters is what that backward
    reduced.

    Args:
        root: the module that was trained; what is sharded may be a part of it.
        called: submodules whose ``forward`` is called past their hooks.
    """

    def __init__(self, root: nn.Module, called: Collection[nn.Module]) -> None:
        self._parts = list(sharded_parts(root))
        inside = {m for module in called for m in module.modules() if m is not module}
        # whoever is called as a module gathers its own
        self._held = [part for part in self._parts if part not in inside]  # type: ignore[comparison-overlap]
        below = {m for part in self._parts for m in part.modules() if m is not part}  # type: ignore[attr-defined]
        self._roots = [part for part in self._parts if part not in below]

    def dtypes(self) -> set[torch.dtype]:
        """What the parameters are computed with."""
        return {dtype for part in self._parts for dtype in compute_dtypes(part)}

    def shards(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """``parameters``, some of which may be gathered now, as optimizers know them."""
        known = {id(p._unsharded_param): p.sharded_param for p in self._parameters() if hasattr(p, "_unsharded_param")}
        return [known.get(id(p), p) for p in parameters]

    def _parameters(self) -> Iterator[Any]:
        return (parameter for part in self._parts for parameter in parameters_of(part))

    @contextmanager
    def beside_training(self) -> Iterator[None]:
        """Afterwards gradients, gathered parameters and FSDP's own notes are what they were."""
        gathered = [part for part in self._parts if is_gathered(part)]
        restore = [noted_passes(self._parts), put_gradients_aside(self._parts)]
        try:
            yield
        finally:
            for step in restore:
                step()
            for part in self._parts:
                part.unshard() if part in gathered else part.reshard()

    def gather(self) -> None:
        """Before a forward. A collective."""
        for root in self._roots:
            begin_as_root(root)
        for part in self._held:
            part.unshard()

    def backward(self, loss: Tensor) -> None:
        """Of ``loss``, with the gradients of all that took part in it reduced at its end. A collective."""

        def finish(_: Tensor) -> None:
            for root in self._roots:
                finish_backward(root)

        handle = loss.register_hook(finish)
        try:
            loss.backward()
        finally:
            handle.remove()


def copies_of(parameter: Tensor) -> int:
    """On how many ranks each of its entries is."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(parameter, DTensor):
        return ranks
    mesh, pieces = parameter.device_mesh, 1
    for dimension, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            pieces *= mesh.size(dimension)
    return ranks // pieces
