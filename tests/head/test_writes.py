"""In-place writes into logits, and into views and copies of them, are seen where torch lets them be seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lazy_cases import Case, assert_same, case, close
from torch import Tensor

LABELS = torch.tensor([[1, 4, -100, 2, 8], [0, -100, 3, 3, -100], [7, -100, -100, -100, -100]])


def loss_of(x: Tensor) -> Tensor:
    return F.cross_entropy(x.reshape(-1, x.shape[-1]), LABELS.reshape(-1))


def set_item(x: Tensor) -> Tensor:
    x[:, :, 0] = -30.0
    return loss_of(x)


def divide(x: Tensor) -> Tensor:
    x.div_(1.7)
    return loss_of(x)


def augmented(x: Tensor) -> Tensor:
    x *= 0.3
    x += 1
    return x.square().mean()


def masked_fill(x: Tensor) -> Tensor:
    x.masked_fill_(torch.arange(9) == 2, -30.0)
    return loss_of(x)


def through_a_view(x: Tensor) -> Tensor:
    view = x[:, :-1]
    view.mul_(0.5)
    return loss_of(x) + view.square().mean()


def through_a_view_of_a_view(x: Tensor) -> Tensor:
    flat = x.view(-1, 9)
    head, tail = flat[:4], flat[4:].transpose(0, 1)
    tail[2:].mul_(3.0)
    return loss_of(x) + head.square().mean() + tail.square().sum()


def under_a_view(x: Tensor) -> Tensor:
    view = x.transpose(1, 2)
    x[:, 0] = 0.3
    return F.cross_entropy(view, LABELS)


def after_a_copy(x: Tensor) -> Tensor:
    logp, picked, kept = x.log_softmax(-1), x[LABELS != -100], x.clone()
    x[:, :, 1] = 7.0
    return logp.gather(-1, LABELS.clamp_min(0)[..., None]).sum() + picked.square().sum() + kept.mean() + x.mean()


def into_a_copy(x: Tensor) -> Tensor:
    other = x.clone()
    other[..., 3] = 0.0
    return loss_of(x) + other.square().mean()


def contiguous_is_no_copy(x: Tensor) -> Tensor:
    same = x.contiguous().float() if x.dtype == torch.float32 else x.contiguous()
    same.mul_(0.5)
    return loss_of(x)


def through_detach(x: Tensor) -> Tensor:
    x.detach().mul_(0.5)
    return loss_of(x)


def into_log_probabilities(x: Tensor) -> Tensor:
    logp = x.log_softmax(-1)
    return (logp * 1.0).masked_fill_(logp < -3, 0.0).sum() + loss_of(x)


def out_argument(x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(x.detach(), 2.0, out=torch.empty(3, 5, 9, dtype=x.dtype))
    return loss_of(x)


def through_a_view_of_the_vocabulary(x: Tensor) -> Tensor:
    part = x[:, :-1]
    part.select(-1, 0).mul_(0.5)
    x[..., ::2].mul_(0.5)
    return loss_of(x) + part.square().mean()


def into_a_view_that_was_read(x: Tensor) -> Tensor:
    part, inner = x[:, :-1], x[:, :-1][:, 1:]
    total = part.cumsum(-1).mean() + inner.cumsum(-1).mean()
    part.mul_(2.0)
    return loss_of(x) + total + inner.square().mean()


def into_a_copy_of_log_probabilities(x: Tensor) -> Tensor:
    logp = x.log_softmax(-1)
    other = logp.clone()
    other.select(-1, 0).mul_(0.5)
    return other.square().mean() + logp.square().mean()


def after_a_copy_was_read_through_a_view(x: Tensor) -> Tensor:
    logp = x.log_softmax(-1)
    part = x.select(-1, 1) if x.dim() else x
    column = x[..., ::3]
    column.mul_(0.1)
    return logp.gather(-1, LABELS.clamp_min(0)[..., None]).sum() + part.sum() + loss_of(x)


WRITES = [
    through_a_view_of_the_vocabulary,
    into_a_view_that_was_read,
    into_a_copy_of_log_probabilities,
    after_a_copy_was_read_through_a_view,
    set_item,
    divide,
    augmented,
    masked_fill,
    through_a_view,
    through_a_view_of_a_view,
    under_a_view,
    after_a_copy,
    into_a_copy,
    contiguous_is_no_copy,
    through_detach,
    into_log_probabilities,
    out_argument,
]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("function", WRITES)
def test_writes(function: Callable[[Tensor], Tensor], padded: bool) -> None:
    assert_same(case(padded=padded), function, fused=False)


def step(c: Case) -> None:
    with torch.no_grad():
        c.weight.mul_(0.5)


def test_logits_read_after_their_weights_changed_are_an_error() -> None:
    """PPO-like code keeps logits over an optimizer's step: they would be computed from the new weights."""
    for read in (loss_of, lambda x: x.sort(-1).values, lambda x: x.log_softmax(-1)[:, 1:].amax(-1)):
        c = case()
        with torch.no_grad():
            x = c.lazy()
        kept = x[..., :-1, :]
        step(c)
        with pytest.raises(RuntimeError, match="changed in place"):
            read(x)
        with pytest.raises(RuntimeError, match="changed in place"):
            kept.argmax(-1)


def test_operands_that_change_later() -> None:
    c, mask, temperature = case(), torch.ones(3, 5, 1, dtype=torch.float64), torch.tensor(2.0)
    x = c.lazy() / temperature
    masked = x * mask
    expected = c.ordinary() / temperature
    temperature.mul_(3.0)
    mask.zero_()
    close(x.logsumexp(-1), expected.logsumexp(-1), 1e-12)
    with pytest.raises(RuntimeError, match="changed in place"):
        masked.sum()


def test_values_that_were_read_survive_a_change() -> None:
    c = case()
    x, expected = c.lazy(), c.ordinary()
    total = x.cumsum(-1)
    step(c)
    close(total, expected.cumsum(-1), 1e-12)
    close(x.exp().sum(-1), expected.exp().sum(-1), 1e-12)
