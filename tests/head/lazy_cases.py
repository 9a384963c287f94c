"""Logits twice, lazy and ordinary, from the same leaves, so that any code can be run on both and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.head.lazy import Head, LazyRows
from lightning_liger.report import HeadReport


class FullRun:
    """Stands for the backbone's padded run; counts who needed it."""

    def __init__(self, full: Tensor) -> None:
        self.full = full
        self.reads: list[str] = []

    def value(self, path: Any) -> Tensor:
        return self.full

    def scored(self, what: str) -> None:
        self.reads.append(f"scored by {what}")

    def read(self, path: Any, what: str, differentiable: bool) -> Tensor | None:
        self.reads.append(what)
        return self.full

    def watch(self, what: str) -> None:
        return None


@dataclass
class Case:
    """Leaves of one model's head: ``hidden`` ``(B, S, H)`` of the padded run, ``weight`` ``(V, H)``, ``bias``."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    mask: Tensor | None = None
    report: HeadReport = field(default_factory=lambda: HeadReport("head"))
    plain: FullRun = field(init=False)

    def __post_init__(self) -> None:
        self.plain = FullRun(self.hidden)

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None and t.requires_grad]

    def ordinary(self) -> Tensor:
        return F.linear(self.hidden, self.weight, self.bias)

    def lazy_hidden(self) -> Tensor:
        if self.mask is None:
            return self.hidden
        index = torch.full(self.mask.shape, -1)
        index[self.mask] = torch.arange(int(self.mask.sum()))
        return LazyRows.hidden(self.hidden[self.mask], index, has_pads=True, plain=self.plain)

    def lazy(self) -> LazyRows:
        hidden = self.lazy_hidden()
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self.hidden.dtype
        return LazyRows.logits(hidden, Head(self.weight, self.bias, dtype, "torch", self.report))


def case(
    *,
    batch: int = 3,
    length: int = 5,
    width: int = 6,
    vocab: int = 9,
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    padded: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    mask = None
    if padded:
        lengths = torch.tensor([max(1, length - 2 * row) for row in range(batch)])
        mask = torch.arange(length) < lengths[:, None]
        if seed % 2:
            mask = mask.flip(1)
    return Case(leaf(batch, length, width), leaf(vocab, width), leaf(vocab) if bias else None, mask)


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def assert_same(
    cases: Case | list[Case], function: Callable[..., Tensor], tolerance: float = 1e-9, *, fused: bool | None = None
) -> None:
    """``function(*logits)`` and its gradients agree on lazy and on ordinary logits.

    Args:
        fused: assert that logits were (False) or were not (True) computed in full.
    """
    cases = cases if isinstance(cases, list) else [cases]
    leaves = [t for c in cases for t in c.leaves]
    expected = function(*(c.ordinary() for c in cases))
    found = function(*(c.lazy() for c in cases))
    assert not isinstance(found, LazyRows)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    close(found, expected, tolerance)
    assert found.requires_grad == expected.requires_grad
    if expected.requires_grad:
        weights = torch.arange(1, expected.numel() + 1, dtype=torch.float64).view(expected.shape).to(expected.dtype)
        pairs = zip(
            gradients((found * weights).sum(), leaves), gradients((expected * weights).sum(), leaves), strict=True
        )
        for a, b in pairs:
            close(a, b, tolerance)
    if fused is not None:
        by = {k: v for c in cases for k, v in c.report.materialised_by.items()}
        assert (not by) == fused, by


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative to the norm of the whole (sums that cancel have almost none); NaN and infinity must stand in the same places."""
    a, b = found.detach().double(), expected.detach().double()
    assert torch.equal(a.isfinite(), b.isfinite()), (found, expected)
    odd = ~b.isfinite()
    assert torch.equal(a[odd].nan_to_num(), b[odd].nan_to_num())
    difference = (a - b).masked_fill(odd, 0.0).norm() / b.masked_fill(odd, 0.0).norm().clamp_min(
        max(1e-3, 5 * tolerance)
    )
    assert float(difference) <= tolerance, (float(difference), found, expected)
