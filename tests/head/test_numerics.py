"""What happens at the edges of a loss, and how precise its gradients are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lazy_cases import Case, assert_same, case, close
from torch import Tensor

from lightning_liger.head import chunks
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_many_times(dtype: torch.dtype) -> None:
    """Each backward scales what the forward saved by its own factor, in fp32, and only the last may use it up."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(n, 32, generator=generator).to(dtype).requires_grad_() for n in (64, 50)]
    labels = torch.randint(0, 50, (64,), generator=generator)
    head = Head(leaves[1], None, dtype, "torch", HeadReport("head"))
    z = LazyRows.logits(leaves[0], head).float()
    losses = [F.cross_entropy(z, labels), F.cross_entropy(z, labels, weight=torch.linspace(0.5, 1, 50))]
    if dtype == torch.float32:  # in bf16 the logits' own gradients, most of them -1, are rounded after the scaling
        losses.append(F.cross_entropy(z, labels, reduction="none").sum())
    for loss in losses:
        (whole,) = torch.autograd.grad(loss, leaves[1], retain_graph=True)
        kept = whole.clone()
        for factor, keep in ((1 / 3, True), (0.7, True), (1 / 3, False)):
            (part,) = torch.autograd.grad(loss * factor, leaves[1], retain_graph=keep)
            ratio = float((part.double() * kept.double()).sum() / kept.double().square().sum())
            assert ratio == pytest.approx(factor, rel=1e-5 if dtype == torch.float32 else 5e-4)
        assert torch.equal(whole, kept)


def test_several_backwards_at_once() -> None:
    c = case()
    loss = F.cross_entropy(c.lazy().flatten(0, 1), torch.arange(15) % 9)
    (once,) = torch.autograd.grad(loss, c.weight, retain_graph=True)
    factors = torch.tensor([1.0, 2.0], dtype=loss.dtype)
    (found,) = torch.autograd.grad(loss, c.weight, factors, is_grads_batched=True)
    torch.testing.assert_close(found, torch.stack((once, 2 * once)))


def test_two_losses_and_accumulation() -> None:
    """Gradients that one backward gave away are not written to by the next."""

    def steps(x: Tensor, y: Tensor) -> Tensor:
        first = F.cross_entropy(x.flatten(0, 1), torch.arange(15) % 9)
        second = F.cross_entropy(y.flatten(0, 1), torch.arange(15) % 7, reduction="sum", label_smoothing=0.1)
        return first / 4 + 0.3 * second - F.cross_entropy(x[:, 1:].transpose(1, 2), torch.zeros(3, 4).long())

    c = case()
    assert_same([c, Case(c.hidden, c.weight, c.bias)], steps, fused=True)
    for leaf in c.leaves:
        leaf.grad = None
    for factor in (1.0, 0.5):
        (F.cross_entropy(c.lazy().flatten(0, 1), torch.arange(15) % 9) * factor).backward()
    found = [leaf.grad for leaf in c.leaves]
    expected = torch.autograd.grad(F.cross_entropy(c.ordinary().flatten(0, 1), torch.arange(15) % 9), c.leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, 1.5 * b)


def test_chunks_are_even_and_fit_their_budget() -> None:
    cuda, vocab = torch.device("cuda"), 151_936
    for n in (1, 1023, 2048, 4096, 5000, 16384, 65536, 70001):
        for spared in (0, 272 << 20):
            parts = chunks.row_chunks(n, vocab, cuda, 2, in_place=True, spared=spared)
            sizes = [p.stop - p.start for p in parts]
            assert sum(sizes) == n and [p.start for p in parts] == [sum(sizes[:i]) for i in range(len(sizes))]
            assert max(sizes) * vocab * 2 <= (3 << 29) + spared + 128 * vocab * 2
            assert min(sizes) >= max(sizes) - 128 * len(sizes)
    assert [p.stop for p in chunks.row_chunks(16384, vocab, cuda, 2, in_place=True)] == [4096, 8192, 12288, 16384]
    assert chunks.row_chunks(0, vocab, cuda, 2) == []


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
