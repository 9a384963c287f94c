"""Several readers of the same logits compute their products once, and get the gradients that plain code gets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lazy_cases import Case, case, close, gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_liger.head.lazy import Head, LazyRows
from lightning_liger.head.readings import Habits

BATCH, LENGTH, VOCAB = 2, 12, 31
LABELS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 7 % VOCAB


def logits_case(**options: object) -> Case:
    return case(batch=BATCH, length=LENGTH, width=16, vocab=VOCAB, **options)  # type: ignore[arg-type]


class Model:
    """One head that is called again and again."""

    def __init__(self, c: Case) -> None:
        self.case, self.habits = c, Habits()

    def logits(self) -> LazyRows:
        x = self.case.lazy()
        hidden, head = x.view_.source, x.view_.source.head
        again = Head(head.weight, head.bias, head.dtype, head.backend, head.report, habits=self.habits)
        if self.case.mask is None:
            return LazyRows.logits(self.case.hidden, again)
        index = hidden.row_of.view(self.case.mask.shape)
        return LazyRows.logits(LazyRows.hidden(hidden.rows, index, has_pads=True, plain=self.case.plain), again)


def logp(x: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, LABELS[..., None])[..., 0]


def counts(x: Tensor) -> Tensor:
    """Every position but padding, which a mask of the right shape takes out."""
    return torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 2]])


def bonus(x: Tensor) -> Tensor:
    p, q = x.softmax(-1), x.log_softmax(-1)
    return -((logp(x) - 0.1 * (p * q).sum(-1)) * counts(x)).sum()


def z_loss(x: Tensor) -> Tensor:
    labels = LABELS.masked_fill(~counts(x), -100)
    return F.cross_entropy(x.flatten(0, 1), labels.flatten()) + 1e-2 * (x.logsumexp(-1).square() * counts(x)).sum() / 20


def three(x: Tensor) -> Tensor:
    """A clipped ratio, an entropy and the best id, in other shapes."""
    rows = x[:, :-1].float().reshape(-1, VOCAB) / 0.7
    ids, keep = LABELS[:, 1:].reshape(-1), counts(x)[:, :-1].reshape(-1)
    lp = torch.log_softmax(rows, -1)
    picked = lp[torch.arange(len(ids)), ids]
    entropy = -(lp.exp() * lp).sum(-1)
    right = (rows.argmax(-1) == ids) & keep
    return ((picked.exp() - 0.01 * entropy) * keep).sum() + 0 * right.sum()


def preference(x: Tensor) -> Tensor:
    """Other rows of the same call: nothing to share."""
    both = logp(x) * counts(x)
    return F.logsigmoid(both[0].sum() - both[1].sum()) + 0.1 * (x[:1].logsumexp(-1) * counts(x)[:1]).sum()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "log-probabilities and an entropy": bonus,
    "loss and z-loss": z_loss,
    "ratio, entropy and accuracy": three,
    "other rows": preference,
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_gradients_are_the_same_every_time(name: str, padded: bool) -> None:
    c = logits_case(padded=padded)
    model = Model(c)
    expected = LOSSES[name](c.ordinary())
    wanted = gradients(expected, c.leaves)
    for _ in range(3):
        found = LOSSES[name](model.logits())
        close(found, expected, 1e-6)  # three() computes in fp32
        for a, b in zip(gradients(found, c.leaves), wanted, strict=True):
            close(a, b, 1e-6)
    assert c.report.materialised_by == {}
    assert c.plain.reads == []


def flops(run: Callable[[], Tensor], leaves: list[Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(run(), leaves, allow_unused=True)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", ["log-probabilities and an entropy", "loss and z-loss", "ratio, entropy and accuracy"])
def test_products_are_computed_once(name: str) -> None:
    """All readers together cost what one costs, from the second step on."""
    c = logits_case()
    model, alone, loss = Model(c), Model(c), LOSSES[name]

    def one() -> Tensor:
        x = alone.logits()
        return logp(x).sum() if not name.startswith("ratio") else x[:, :-1].logsumexp(-1).sum()

    used = [flops(lambda: loss(model.logits()), c.leaves) for _ in range(3)]
    assert used[0] > used[1] == used[2] == flops(one, c.leaves)


def test_what_is_not_asked_for_any_more_is_forgotten() -> None:
    c = logits_case()
    model = Model(c)
    for _ in range(2):
        bonus(model.logits()).backward()
    assert any(model.habits.followers.values())
    for loss in (logp, logp):
        loss(model.logits()).sum().backward()
    assert not any(model.habits.followers.values())
    for _ in range(2):
        z_loss(model.logits()).backward()
    assert model.habits.joined
    for _ in range(2):
        F.cross_entropy(model.logits().flatten(0, 1), LABELS.flatten()).backward()
    assert not model.habits.joined


def test_one_backward_for_each_loss() -> None:
    c = logits_case()
    x, y = Model(c).logits(), c.ordinary()
    ours = [logp(x).square().sum(), x.logsumexp(-1).square().sum()]
    plain = [logp(y).square().sum(), y.logsumexp(-1).square().sum()]
    for a, b in ((0, 0), (1, 1), (0, 0)):
        for f, e in zip(
            torch.autograd.grad(ours[a], c.leaves, retain_graph=True),
            torch.autograd.grad(plain[b], c.leaves, retain_graph=True),
            strict=True,
        ):
            close(f, e, 1e-9)
    for f, e in zip(gradients(sum(ours), c.leaves), gradients(sum(plain), c.leaves), strict=True):  # type: ignore[arg-type]
        close(f, e, 1e-9)


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    c = logits_case()
    x = Model(c).logits()
    first, second = logp(x), x.logsumexp(-1)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, t: Tensor) -> Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise ArithmeticError

    # the later node runs first
    broken = Fails.apply(first).sum() + second.sum()
    with pytest.raises(ArithmeticError):
        broken.backward(retain_graph=True)
    y = c.ordinary()
    for f, e in zip(gradients(first.sum(), c.leaves), gradients(logp(y).sum(), c.leaves), strict=True):
        close(f, e, 1e-9)


def test_gradients_of_gradients() -> None:
    c = logits_case()

    def penalty(x: Tensor) -> Tensor:
        loss = (logp(x) + x.logsumexp(-1).square()).mean()
        (g,) = torch.autograd.grad(loss, [c.weight], create_graph=True)
        return loss + g.square().sum()

    found, expected = penalty(Model(c).logits()), penalty(c.ordinary())
    close(found, expected, 1e-9)
    for f, e in zip(gradients(found, c.leaves), gradients(expected, c.leaves), strict=True):
        close(f, e, 1e-9)


def test_readers_under_checkpointing() -> None:
    c = logits_case()
    model = Model(c)

    def loss(hidden: Tensor, ours: bool) -> Tensor:
        x = model.logits() if ours else F.linear(hidden, c.weight, c.bias)
        return checkpoint(lambda h: bonus(x * h.mean()), hidden, use_reentrant=False)  # type: ignore[no-any-return]

    for _ in range(2):
        found, expected = loss(c.hidden, True), loss(c.hidden, False)
        close(found, expected, 1e-9)
        for f, e in zip(gradients(found, c.leaves), gradients(expected, c.leaves), strict=True):
            close(f, e, 1e-9)
