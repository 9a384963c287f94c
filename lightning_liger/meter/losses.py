"""Losses on their way to the host."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


class Losses:
    """Copies losses beside the stream that computes, whose queue is long, and waits for none of them."""

    def __init__(self, device: torch.device) -> None:
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._coming: deque[tuple[Any, Tensor, list[Tensor]]] = deque()

    def send(self, losses: list[Tensor]) -> None:
        """Scalars, computed by now."""
        if not losses:
            return
        if self._beside is None:
            self._coming.append((None, _together(losses), losses))
            return
        with torch.cuda.stream(self._beside):
            copy = _together(losses).to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._beside)
        # they are kept, so that nothing else is written where they are read
        self._coming.append((event, copy, losses))

    def arrived(self) -> list[float]:
        """Those that are there and were not returned before, in order."""
        values: list[float] = []
        while self._coming and (self._coming[0][0] is None or self._coming[0][0].query()):
            values += self._coming.popleft()[1].tolist()
        return values


def _together(losses: list[Tensor]) -> Tensor:
    plain = [loss if not (loss.requires_grad or loss.dim()) else loss.detach().reshape(()) for loss in losses]
    return torch.stack(plain).float()
