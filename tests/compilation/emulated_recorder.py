"""CUDA graphs on a CPU: what was recorded is computed again, into the places where its results were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_liger.compilation.recorder import Recorder


class _Forward:
    def __init__(self, function: Callable[[], Any], out: Any) -> None:
        self.function, self.places = function, _tensors(out)
        self.latest = self.places
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.enable_grad():
            self.latest = _tensors(self.function())
        _put(self.latest, self.places)


class _Backward:
    def __init__(self, recording: Any, out: Any) -> None:
        self.recording, self.places = recording, out

    def replay(self) -> None:
        made = self.recording
        found = torch.autograd.grad(made.forward.latest, made.alive, made.grad_outputs, allow_unused=True)
        _put(found, self.places)


class EmulatedRecorder(Recorder):
    """Attributes: recorded: how many forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = 0

    def has_room(self) -> bool:
        return True

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def place(self, tensor: Tensor | None) -> Tensor | None:
        return tensor

    def record(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        self.recorded += 1
        out = function()
        recording = getattr(function, "args", ())
        return out, _Backward(recording[0], out) if recording else _Forward(function, out)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _put(found: Any, places: Any) -> None:
    for new, place in zip(found, places, strict=True):
        if place is not None:
            place.data.copy_(new.data)
