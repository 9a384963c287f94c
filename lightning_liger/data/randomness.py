"""Work that must not change what training draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_numbers_untouched(device: torch.device | None = None) -> Iterator[None]:
    """The global generators of Python, numpy and torch, and that of a CUDA ``device``, are afterwards where they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
