"""What happens at the edges of a loss, and how precise its gradients are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lazy_cases import Case, assert_same, case, close
from torch import Tensor

from lightning_liger.head.lazy import Head, LazyRows
from lightning_liger.head.linear_cross_entropy import linear_cross_entropy
from lightning_liger.report import HeadReport

NOTHING = torch.full((3, 5), -100)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_counts(reduction: str, weighted: bool) -> None:
    """PyTorch's mean over no label is NaN, with gradients of zero."""
    weight = torch.ones(9, dtype=torch.float64) if weighted else None

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x.transpose(1, 2), NOTHING, weight=weight, reduction=reduction)

    c = case()
    expected, found = loss(c.ordinary()), loss(c.lazy())
    torch.testing.assert_close(found, expected, equal_nan=True)
    for a, b in zip(
        torch.autograd.grad(found.sum(), c.leaves), torch.autograd.grad(expected.sum(), c.leaves), strict=True
    ):
        torch.testing.assert_close(a, b, equal_nan=True)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "with weights": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=torch.ones(9).double()),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten()),
    "each": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none"),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("label", [9, -1, 10**6])
@pytest.mark.parametrize("name", list(LOSSES))
def test_labels_outside_of_the_vocabulary(name: str, label: int, padded: bool) -> None:
    labels = torch.zeros(3, 5, dtype=torch.long)
    labels[0, 0] = label
    with pytest.raises(IndexError, match=rf"label {label} is outside .* 9 rows .*resize_token_embeddings"):
        LOSSES[name](case(padded=padded).lazy(), labels)


def test_any_ignore_index() -> None:
    labels = torch.arange(15).view(3, 5) % 9
    for ignored in (-1, 0, 8):
        assert_same(case(), lambda x, i=ignored: F.cross_entropy(x.transpose(1, 2), labels, ignore_index=i), fused=True)


def test_infinite_logits() -> None:
    """A vocabulary entry that is forbidden has probability zero, not NaN."""
    banned = torch.arange(9) == 4
    labels = torch.arange(15).view(3, 5) % 4

    def loss(x: Tensor) -> Tensor:
        x = x.masked_fill(banned, float("-inf"))
        return F.cross_entropy(x.transpose(1, 2), labels) + x.logsumexp(-1).mean()

    assert_same(case(), loss, fused=True)


def test_weight_gradients_of_many_bf16_chunks() -> None:
    """Sums over chunks are fp32: as far from the truth as one product over all rows is."""
    torch.manual_seed(0)
    n, width, vocab = 2048, 32, 64
    exact = [torch.randn(n, width).double() / 4, torch.randn(vocab, width).double() / 4]
    labels = torch.randint(0, vocab, (n,))
    leaves = [t.clone().requires_grad_() for t in exact]
    F.cross_entropy(F.linear(*leaves), labels).backward()
    truth = leaves[1].grad
    low = [t.bfloat16().requires_grad_() for t in exact]
    F.cross_entropy(F.linear(*low).float(), labels).backward()

    def error(gradient: Tensor | None) -> float:
        assert gradient is not None and truth is not None
        return float((gradient.double() - truth).norm() / truth.norm())

    plain = error(low[1].grad)
    head = Head(low[1], None, torch.bfloat16, "torch", HeadReport("head"))
    for function in (
        lambda: linear_cross_entropy(low[0], low[1], None, labels),
        lambda: -LazyRows.logits(low[0], head).log_softmax(-1).gather(-1, labels[:, None]).mean(),
    ):
        low[1].grad = None
        function().backward()
        assert error(low[1].grad) <= plain * 1.2 < 0.02


def test_repeated_rows_add_up_in_fp32() -> None:
    """A row that 4,096 losses read: bf16 sums would stop growing at 256."""
    hidden = torch.zeros(1, 1, 4).bfloat16().requires_grad_()
    weight = torch.eye(4).bfloat16().requires_grad_()
    x = Case(hidden, weight, None).lazy().expand(1, 4096, 4)
    F.cross_entropy(x.flatten(0, 1), torch.zeros(4096, dtype=torch.long), reduction="sum").backward()
    assert hidden.grad is not None
    close(hidden.grad.flatten(), torch.tensor([-3072.0, 1024.0, 1024.0, 1024.0]), 1e-2)


def test_no_rows_at_all() -> None:
    c = case(batch=1, length=2)
    keep = torch.zeros(1, 2, dtype=torch.bool)
    for function in (
        lambda x: x[keep].logsumexp(-1).sum(),
        lambda x: x[keep].log_softmax(-1).gather(-1, torch.zeros(0, 1, dtype=torch.long)).sum(),
        lambda x: F.cross_entropy(x[keep], torch.zeros(0, dtype=torch.long), reduction="sum"),
    ):
        assert_same(c, function, fused=True)


def test_frozen_parts() -> None:
    """Only the gradients that somebody wants are computed, and the others stay None."""
    for frozen in ("hidden", "weight", "bias"):
        c = case()
        getattr(c, frozen).requires_grad_(False)
        assert_same(c, lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(15) % 9), fused=True)
        assert_same(c, lambda x: x.log_softmax(-1)[..., 2], fused=True)
