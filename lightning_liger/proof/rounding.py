"""How far a run is from itself when it rounds otherwise: Monte Carlo arithmetic.

Every differentiable result of a torch function, and every gradient that comes back to it, is multiplied by
``1 + u x``, with ``u`` the unit roundoff of its dtype and ``x`` uniform in [-1, 1]: as good an answer of the same
precision. A sum of ``n`` terms is off by about ``sqrt(n)`` roundoffs of the dtype that it is accumulated in (N. Higham, T.
Mary, SIAM J. Sci. Comput. 41(5), 2019), so that products and sums are given that. How far loss and gradients then move is the run's own rounding error (D. S. Parker, Monte Carlo Arithmetic,
UCLA CSD-970002, 1997), without a second copy of the model in another dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# A tensor core reads fp32 with 10 bits of mantissa where TF32 is allowed.
_TF32 = 2.0**-11


# Functions that add up; of how many terms is read off their first argument.
_SUMS = {
    *(
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "einsum",
        "__matmul__",
        "__rmatmul__",
        "conv1d",
        "sum",
        "mean",
    ),
    *(
        "softmax",
        "log_softmax",
        "logsumexp",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "norm",
        "vector_norm",
        "var",
        "std",
    ),
    *("scaled_dot_product_attention", "cross_entropy", "nll_loss", "kl_div", "cumsum", "embedding"),
}


def roundoff_of_sum(terms: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of ``terms`` terms, kept in ``dtype``: half precision is accumulated in fp32."""
    within = torch.promote_types(dtype, torch.float32)
    return max(unit_roundoff(dtype, device), terms**0.5 * torch.finfo(within).eps / 2)


def _terms(function: Any, args: tuple[Any, ...], out: Tensor) -> int:
    """How many terms each entry of ``out`` is a sum of."""
    if (
        getattr(function, "__name__", "") not in _SUMS
        or not args
        or not isinstance(args[0], Tensor)
        or not args[0].dim()
    ):
        return 1
    if args[0].dim() == out.dim():
        return max(int(args[0].shape[-1]), 1)
    return max(args[0].numel() // max(out.numel(), 1), 1)


def unit_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Half the distance from 1 to the next number; of TF32 for fp32 where matrix products may use that."""
    if dtype == torch.float32 and device.type == "cuda" and _allows_tf32():
        return _TF32
    return torch.finfo(dtype).eps / 2


def _allows_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by the newer switches, which the older question refuses to speak about
        return True


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Noise, terms: int) -> Tensor:
        ctx.noise, ctx.terms = noise, terms
        return noise(x, terms)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.noise(grad, ctx.terms), None, None


class Noise:
    """Rounds at random, with generators of its own: the model draws what it draws without it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, x: Tensor, terms: int) -> Tensor:
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        unit = roundoff_of_sum(terms, x.dtype, x.device)
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
                return _Rounded.apply(out, self._noise, _terms(func, args, out))
        return out
