"""How far a run is from itself when it rounds otherwise: Monte Carlo arithmetic.

Every differentiable result of a torch function, and every gradient that comes back to it, is multiplied by
``1 + u x``, with ``u`` the unit roundoff of its dtype and ``x`` uniform in [-1, 1]: as good an answer of the same
precision. How far loss and gradients then move is the run's own rounding error (D. S. Parker, Monte Carlo Arithmetic,
UCLA CSD-970002, 1997), without a second copy of the model in another dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# A tensor core reads fp32 with 10 bits of mantissa where TF32 is allowed.
_TF32 = 2.0**-11


def unit_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Half the distance from 1 to the next number; of TF32 for fp32 where matrix products may use that."""
    if dtype == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return _TF32
    return torch.finfo(dtype).eps / 2


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Noise) -> Tensor:
        ctx.noise = noise
        return noise(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.noise(grad), None


class Noise:
    """Rounds at random, with generators of its own: the model draws what it draws without it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        unit = unit_roundoff(x.dtype, x.device)
        drawn = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=self._generators[x.device])
        # the lowest numbers of a dtype are masks, and stay finite
        finite = x if x.dtype == torch.float16 else x.clamp(-1e30, 1e30)
        return drawn.mul_(2 * unit).sub_(unit).mul_(finite).add_(x)


class Rounding(TorchFunctionMode):
    """While it is entered, results are rounded at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._noise = Noise(seed)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and type(out) is Tensor and out.requires_grad and not out.is_leaf:
            fresh = out._base is None and not any(out is a for a in args)
            if fresh and out.dtype.is_floating_point:
                return _Rounded.apply(out, self._noise)
        return out
