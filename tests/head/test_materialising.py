"""Whatever looks at logits as a tensor gets one: hooks, gradients, foreign functions, transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Twice
from lazy_cases import Case, assert_same, case, close, gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LABELS = torch.tensor([[1, 4, -100, 2, 8], [0, -100, 3, 3, -100], [7, -100, -100, -100, -100]])


def loss_of(x: Tensor) -> Tensor:
    return F.cross_entropy(x.reshape(-1, x.shape[-1]), LABELS.reshape(-1))


# -- hooks and gradients of logits -----------------------------------------------------------------------------------


def hook(x: Tensor) -> Tensor:
    x.register_hook(lambda g: g * 2)
    return loss_of(x)


def hook_on_a_view(x: Tensor) -> Tensor:
    view = x[:, :-1]
    view.register_hook(lambda g: g * 3)
    return F.cross_entropy(view.flatten(0, 1), LABELS[:, 1:].flatten()) + loss_of(x)


def hook_seen_by_earlier_views(x: Tensor) -> Tensor:
    logp = x.log_softmax(-1)
    x.register_hook(lambda g: g * 2)
    return logp.gather(-1, LABELS.clamp_min(0)[..., None]).sum()


@pytest.mark.parametrize("function", [hook, hook_on_a_view, hook_seen_by_earlier_views])
def test_hooks(function: Callable[[Tensor], Tensor]) -> None:
    assert_same(case(), function, fused=False)


def test_retained_gradient_of_logits() -> None:
    c = case()
    found = []
    for x in (c.ordinary(), c.lazy()):
        x.retain_grad()
        loss_of(x).backward()
        assert x.grad is not None
        found.append(x.grad)
    close(found[1], found[0], 1e-12)


def test_gradient_of_logits_by_autograd_grad() -> None:
    c = case()
    found = []
    for x in (c.ordinary(), c.lazy()):
        x.register_hook(lambda g: None)
        found.append(torch.autograd.grad(loss_of(x), x)[0])
    close(found[1], found[0], 1e-12)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x, loss: torch.autograd.grad(loss, x, allow_unused=True),
        lambda x, loss: torch.autograd.grad([loss], [x]),
        lambda x, loss: loss.backward(inputs=[x]),
        lambda x, loss: x.retain_grad(),
        lambda x, loss: x.register_hook(print),
    ],
)
def test_gradient_of_logits_asked_for_after_the_loss_is_an_error(ask: Callable[[Tensor, Tensor], Any]) -> None:
    x = case().lazy()
    loss = loss_of(x)
    with pytest.raises(RuntimeError, match="fused_head=False"):
        ask(x, loss)


def test_a_look_without_gradients_does_not_forbid_hooks() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            assert x.argmax(-1).shape == (3, 5) and float(x[:, -1].cumsum(-1).sum()) != 0
        assert x.grad is None
        return hook(x)

    assert_same(case(), function)


def test_hook_after_a_part_was_computed_by_itself_is_an_error() -> None:
    x = case().lazy()
    total = x[:, -1].cumsum(-1).sum() + x.cumsum(-1).sum()
    with pytest.raises(RuntimeError, match="fused_head=False"):
        x.register_hook(print)
    assert total.requires_grad


class _L2Wrap(torch.autograd.Function):
    """The penalty on the largest logit as RWKV-like code adds it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        largest, ids = torch.max(y, -1, keepdim=True)
        penalty = torch.zeros_like(y)
        penalty.scatter_(-1, ids, largest * 1e-2)
        return grad, penalty


class _Reversal(torch.autograd.Function):
    """A gradient that is not that of what is computed; the result is a lazy tensor again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        return make(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -0.5 * grad, None


@pytest.mark.parametrize("make", [lambda x: x * 2, lambda x: x, lambda x: x.view_as(x), lambda x: x.clone()])
def test_a_custom_function_has_the_last_word_on_gradients(make: Callable[[Tensor], Tensor]) -> None:
    assert_same(case(), lambda x: loss_of(_Reversal.apply(x, make)))
    cut = lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())  # noqa: E731
    assert_same(case(), lambda x: 2 * cut(_Reversal.apply(x, make)))


def test_custom_functions() -> None:
    assert_same(case(), lambda x: _L2Wrap.apply(loss_of(x), x))
    assert_same(case(), lambda x: loss_of(Twice.apply(x)))
    labels = LABELS.clone()
    labels[1, 3] = -100  # the padded batch counts no padding here
    assert_same(case(padded=True), lambda x: F.cross_entropy(Twice.apply(x).transpose(1, 2), labels))


def test_a_custom_function_that_counts_padding() -> None:
    """Its gradients go through the padded run where backward() collects them, and are an error elsewhere."""
    c = case(padded=True)
    found = []
    for make in (c.ordinary, c.lazy):
        x = make()
        found.append(gradients_by_backward(_L2Wrap.apply(loss_of(x), x), c))
    for a, b in zip(*found, strict=True):
        close(b, a, 1e-12)
    x = c.lazy()
    with pytest.raises(RuntimeError, match="padding_free=False"):
        gradients(_L2Wrap.apply(loss_of(x), x), c.leaves)


def test_second_derivatives() -> None:
    c = case()

    def penalty(x: Tensor) -> Tensor:
        picked = x.log_softmax(-1).gather(-1, LABELS.clamp_min(0)[..., None]).sum()
        (first,) = torch.autograd.grad(picked, c.hidden, create_graph=True)
        return first.square().sum()

    assert_same(c, penalty)
    loss = loss_of(c.lazy())
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss, c.hidden, create_graph=True)


# -- graphs ----------------------------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": loss_of,
    "none": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), reduction="none").square().sum(),
    "gather": lambda x: x.log_softmax(-1).gather(-1, LABELS.clamp_min(0)[..., None]).square().sum(),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
    "loss and entropy": lambda x: loss_of(x) - 0.1 * torch.special.entr(x.softmax(-1)).sum(-1).mean() + x.mean(),
    "weighted": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), weight=torch.rand(9, dtype=x.dtype)),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_two_backwards_over_a_retained_graph(name: str) -> None:
    c = case()
    torch.manual_seed(0)
    loss = LOSSES[name](c.lazy())
    first = torch.autograd.grad(loss, c.leaves, retain_graph=True)
    second = torch.autograd.grad(loss * 3, c.leaves)
    for a, b in zip(first, second, strict=True):
        close(b, a * 3, 1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mean", "gather", "entropy"])
@pytest.mark.parametrize("around", ["head", "head and loss"])
def test_checkpointing_around_the_head(reentrant: bool, name: str, around: str) -> None:
    c = case()

    def head(hidden: Tensor) -> Tensor:
        return Case(hidden, c.weight, c.bias, report=c.report).lazy()

    expected = LOSSES[name](c.ordinary())
    if around == "head":
        found = LOSSES[name](checkpoint(head, c.hidden, use_reentrant=reentrant))
    else:
        found = checkpoint(lambda h: LOSSES[name](head(h)), c.hidden, use_reentrant=reentrant)
    close(found, expected, 1e-12)
    for a, b in zip(gradients_by_backward(found, c), gradients(expected, c.leaves), strict=True):
        close(a, b, 1e-12)


def gradients_by_backward(loss: Tensor, c: Case) -> list[Tensor]:
    """Reentrant checkpointing knows no ``torch.autograd.grad``."""
    loss.backward()
    found = [t.grad for t in c.leaves]
    for t in c.leaves:
        t.grad = None
    assert all(g is not None for g in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["mean", "none", "gather", "entropy"])
def test_autocast(name: str) -> None:
    """Under autocast the product is bf16 and what follows is fp32."""
    c = case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(c, LOSSES[name], 2e-2, fused=True)


def test_without_gradients() -> None:
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same(case(padded=True), loss_of, fused=True)
            assert_same(case(padded=True), lambda x: x.softmax(-1).amax(-1), fused=True)
            assert_same(case(padded=True), lambda x: x.argmax(-1), fused=True)
            assert_same(case(padded=True), lambda x: x.sort(-1).values, fused=False)


def test_values_read_without_gradients_leave_the_graph_alone() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            assert float(x.cumsum(-1).sum()) != 0
        return x.cumsum(-1).square().sum()

    assert_same(case(), function, fused=False)


def test_compiled_loss_functions() -> None:
    for fullgraph in (False, True):
        compiled = torch.compile(loss_of, backend="eager", fullgraph=fullgraph)
        assert_same(case(), compiled)
    for padded in (False, True):
        torch._dynamo.reset()
        assert_same(case(padded=padded), torch.compile(LOSSES["gather"], backend="aot_eager"))
    torch._dynamo.reset()


def test_transforms() -> None:
    """``torch.func`` and ``vmap`` over functions of logits give the right answer."""
    c = case()
    with torch.no_grad():
        a, b = (torch.func.vmap(lambda row: row.logsumexp(-1))(x) for x in (c.ordinary(), c.lazy()))
        close(b, a, 1e-12)
        a, b = (torch.func.grad(lambda x: loss_of(x))(x) for x in (c.ordinary(), c.lazy()))
        close(b, a, 1e-12)
