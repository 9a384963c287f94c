"""Random numbers, devices, dtypes and modes of the process, kept out of a comparison and kept as they are by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def undisturbed(device: torch.device | None = None) -> Iterator[None]:
    """Inside: gradients on, no autocast, fp32, tensors on the CPU, the same random numbers every time.

    Afterwards all of that is as before. ``torch.manual_seed`` is not used: it would reseed the generators of every
    accelerator, or queue that for the moment when one is first touched.

    Args:
        device: where the code inside computes; its generator is put back too, if that code draws from it.
    """
    kind = "cpu" if device is None else device.type
    devices = [device] if device is not None and kind == "cuda" else []
    dtype = torch.get_default_dtype()
    with (
        torch.random.fork_rng(devices=devices),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(kind, enabled=False),
    ):
        torch.default_generator.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
