"""Whether the kernel computes on this device what PyTorch's operators do, asked once before it is used."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lightning_liger.optim.formula import row_of, update
from lightning_liger.optim.rounding import hashed

_SIZES = (3, 1000, 16384 + 17)
_GROUP = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": False}


@functools.cache
def kernel_fails(device: torch.device, dtype: torch.dtype, state_dtype: torch.dtype) -> str:
    """Why the kernel must not be used for such parameters and moments, or ``""``."""
    try:
        difference = _difference(device, dtype, state_dtype)
    except Exception as error:
        # compilers fail in ways of their own; there are operators for what they do not reach
        text = next(iter(str(error).strip().splitlines()), "")[:200]
        return f"the kernel does not run ({type(error).__name__}: {text})"
    return (
        "" if difference < 1e-5 else f"the kernel's result is off by {difference:.1e} of what PyTorch's operators give"
    )


@torch.no_grad()
def _difference(device: torch.device, dtype: torch.dtype, state_dtype: torch.dtype) -> float:
    """Of weights and moments in norm, relative, after one clipped step.

    Where something is bf16, single entries may go to the other neighbour (3e-5 each); other noise would be 2e-3.
    """
    from lightning_liger.optim.tables import Tables

    generator = torch.Generator().manual_seed(0)

    def draw(dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(size, generator=generator).to(device, dtype) for size in _SIZES]

    weights, gradients = draw(dtype), draw(dtype)
    first, second = draw(state_dtype), [t.abs() for t in draw(state_dtype)]
    keys = [hashed(i + 1) for i in range(len(_SIZES))]
    row = row_of({**_GROUP, "lr": 0.01}, 3)
    factor = torch.full((), 0.5, dtype=torch.float32, device=device)
    expected = [[t.clone() for t in tensors] for tensors in (weights, first, second)]
    for p, g, m, v, key in zip(expected[0], gradients, expected[1], expected[2], keys, strict=True):
        update(p, g * factor.to(dtype), m, v, row, key)
    import numpy as np

    tables = Tables(weights, first, second, keys)
    addresses = np.array([g.data_ptr() for g in gradients], np.int64)
    tables.take(addresses)
    tables.send(addresses, [row])
    tables.adam(factor, False)
    found = [torch.cat([t.double().flatten() for t in tensors]) for tensors in (weights, first, second)]
    wanted = [torch.cat([t.double().flatten() for t in tensors]) for tensors in expected]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
