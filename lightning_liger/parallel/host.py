"""Room for whole tensors on one host: memory while there is enough, a temporary file beyond that."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

_SHARE = 0.8  # of what is free: the rest is for the data loaders and the file cache


def available_bytes() -> int | None:
    """Host memory that is free for use, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def fits(needed: int) -> bool:
    """Whether ``needed`` bytes may be taken from host memory."""
    free = available_bytes()
    return free is None or needed <= _SHARE * free


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the whole tensors, each counted once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


class Room:
    """Keeps copies of whole tensors.

    Args:
        needed: Bytes of all that will be kept.
        folder: Where a temporary file goes if they do not fit; it is gone with the copies, or with the process.
    """

    def __init__(self, needed: int, folder: Path) -> None:
        self._folder = None if fits(needed) else folder

    def keep(self, whole: Tensor) -> Tensor:
        """A copy of ``whole`` that is nobody else's."""
        if self._folder is None or not whole.numel():
            return whole.cpu() if whole.device.type != "cpu" else whole.clone()
        self._folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".gathered-", dir=self._folder)
        os.close(handle)
        mapped = torch.from_file(name, shared=True, size=whole.numel(), dtype=whole.dtype).view(whole.shape)
        os.unlink(name)  # the mapping holds it as long as it is used
        return mapped.copy_(whole)
