"""Is a kernel the same function as the module's own code? Asked with random numbers before anything is bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.kernels.registry import Dtypes, KernelPatch
from lightning_liger.kernels.surroundings import undisturbed
from lightning_liger.patching import bypass

_FP32_TOLERANCE = 1e-5
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Verdict:
    """The candidate that fits, or None and why none does."""

    spec: Any
    reason: str = ""
    dtypes: Dtypes = field(default_factory=dict)


def verify(patch: KernelPatch, module: nn.Module, device: torch.device) -> Verdict:
    """Compare every candidate of ``patch`` with a stand-in of ``module``, forward and backward, in fp32 and bf16.

    In fp32 all outputs and gradients must agree to 1e-5 (relative, row by row). In bf16 the candidate must be about as
    close to the fp32 result as the module's own bf16 code is; of several that fit, the one closest to that code is taken.
    """
    with undisturbed(device), bypass("comparing kernels"), patch.comparing():
        try:
            trial, inputs = patch.trial(module, device)
            rows = len(_outputs(trial(*inputs))) + sum(i.requires_grad for i in inputs)
            exact = torch.float32 in patch.compared(device)
            original = {d: _run(patch, trial, inputs, d, _forward(trial)) for d in patch.compared(device)}
            reference = _reference(patch, trial, inputs)
            own = _distance(reference, original[torch.bfloat16], 0)
            dtypes = _learn_dtypes(patch, trial, inputs)
        except Exception as error:  # any code of the module's own: what cannot be asked is left alone
            return Verdict(None, f"its own code could not be run for the comparison ({_short(error)})")
        best: tuple[float, Any] | None = None
        closest: tuple[float, str] = (float("inf"), "no candidate")
        for spec in patch.candidates(module):
            make = _candidate(patch, spec, dtypes)
            try:
                found = _run(patch, trial, inputs, torch.float32, make) if exact else None
                wrong = 0.0 if found is None else _distance(original[torch.float32], found, rows)
                if wrong > _FP32_TOLERANCE:
                    closest = min(closest, (wrong, f"fp32 differs by {wrong:.1e}"))
                    continue
                rounded = _run(patch, trial, inputs, torch.bfloat16, make)
                ours = _distance(reference, rounded, 0)
                apart = _distance(original[torch.bfloat16], rounded, 0)
            except Exception as error:  # a kernel that cannot handle these shapes
                closest = min(closest, (float("inf"), _short(error)))
                continue
            if ours > 1.5 * own + 1e-3:
                closest = min(closest, (wrong, f"bf16 is {ours:.1e} off where its own code is {own:.1e} off"))
            elif best is None or apart < best[0]:
                best = (apart, spec)
    if best is None:
        return Verdict(None, f"computes something else than the kernel ({closest[1]})")
    return Verdict(best[1], dtypes=dtypes)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]


def _forward(trial: nn.Module) -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda moved: lambda *args: type(trial).forward(moved, *args)


def _candidate(patch: KernelPatch, spec: Any, dtypes: Dtypes) -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda moved: patch.candidate(moved, spec, dtypes)


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _run(
    patch: KernelPatch,
    trial: nn.Module,
    inputs: tuple[Tensor, ...],
    dtype: torch.dtype,
    make: Callable[[nn.Module], Callable[..., Any]],
) -> list[Tensor]:
    """Outputs and all gradients of one function, everything in ``dtype``."""
    moved, args = patch.cast(trial, inputs, dtype, dtype)
    return _with_gradients(moved, args, make(moved))


def _with_gradients(moved: nn.Module, args: Sequence[Tensor], function: Callable[..., Any]) -> list[Tensor]:
    before = [a.detach().clone() for a in args]
    out = _outputs(function(*args))
    generator = torch.Generator("cpu").manual_seed(1)
    wanted = [a for a in args if a.requires_grad] + list(moved.parameters())
    seeds = [torch.randn(o.shape, generator=generator).to(o) for o in out]
    kept = [s.clone() for s in seeds]
    grads = torch.autograd.grad(out, wanted, seeds, allow_unused=True)
    for now, then in zip((*args, *seeds), (*before, *kept), strict=True):
        if not torch.equal(now, then):
            raise RuntimeError("overwrites its arguments")
    return [o.detach() for o in out] + [
        torch.zeros_like(w) if g is None else g for w, g in zip(wanted, grads, strict=True)
    ]


def _reference(patch: KernelPatch, trial: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The original in fp32 on the bf16 run's numbers."""
    moved, args = patch.cast(trial, inputs, torch.bfloat16, torch.bfloat16)
    moved, args = patch.cast(moved, args, torch.float32, torch.float32)
    return _with_gradients(moved, args, _forward(trial)(moved))


def _distance(expected: list[Tensor], found: list[Tensor], rows: int) -> float:
    """Largest relative L2 error over all tensors.

    The first ``rows`` of them, outputs and gradients of inputs, are compared in dtype too, and row by row, so that
    small rows count. Gradients of parameters are sums over rows, in which single entries may cancel to almost nothing.
    """
    worst = 0.0
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a.shape != b.shape or (i < rows and a.dtype != b.dtype):
            return float("inf")
        a, b = a.double(), b.double()
        if i >= rows or a.shape[-1] < 8:
            a, b = a.flatten(), b.flatten()
        error = (a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-12)
        worst = max(worst, float("inf") if bool(error.isnan().any()) else float(error.max()))
    return worst


def _learn_dtypes(patch: KernelPatch, trial: nn.Module, inputs: tuple[Tensor, ...]) -> Dtypes:
    """The dtype of the original's output for each combination that it accepts, with and without autocast."""
    known: Dtypes = {}
    device = next(i.device for i in inputs)
    for x in _DTYPES:
        for weight in _DTYPES:
            moved, args = patch.cast(trial, inputs, x, weight)
            for autocast in (None, torch.bfloat16):
                try:
                    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=autocast is not None):
                        out = _outputs(type(trial).forward(moved, *args))
                except Exception:  # this combination is an error in the original code: it stays one
                    continue
                if len({o.dtype for o in out}) == 1:
                    known[x, weight, autocast] = out[0].dtype
    return known
