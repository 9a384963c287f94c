"""Logits that were made, or taken on, without gradients have none later, whoever reads them then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lazy_cases import Case, assert_same, case
from torch import Tensor

from lightning_liger.head.lazy import LazyRows

MASK = torch.arange(15).view(3, 5) % 3 > 0


def made_without(c: Case, ours: bool) -> Tensor:
    with torch.no_grad():
        return c.lazy() if ours else c.ordinary()


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Padded positions of both are read, in a graph that only the student has."""
    return F.kl_div(student.log_softmax(-1), (teacher * 0.7).softmax(-1), reduction="batchmean")


TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "no_grad": lambda x: torch.no_grad()(lambda: x[:, :] / 1.0)(),
    "clone": lambda x: x.clone().detach(),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("how", list(TAKEN))
def test_a_model_is_its_own_teacher(how: str, padded: bool) -> None:
    assert_same(case(padded=padded), lambda x: kl(x, TAKEN[how](x)), fused=True)


@pytest.mark.parametrize("padded", [False, True])
def test_a_teacher_that_could_be_trained(padded: bool) -> None:
    student, teacher = case(padded=padded), case(padded=padded, seed=2)
    for reader in (kl, lambda s, t: kl(s[MASK], t[MASK]), lambda s, t: kl(s, torch.cat([t[:1], t[1:]]))):
        expected = torch.autograd.grad(
            reader(student.ordinary(), made_without(teacher, False)),
            [*student.leaves, *teacher.leaves],
            allow_unused=True,
        )
        found = torch.autograd.grad(
            reader(student.lazy(), made_without(teacher, True)), [*student.leaves, *teacher.leaves], allow_unused=True
        )
        for f, e in zip(found, expected, strict=True):
            assert (f is None or not f.any()) if e is None else torch.allclose(f, e)


def test_two_calls_without_gradients_are_joined() -> None:
    c = case()
    first, second = made_without(c, True), made_without(c, True)
    joined = torch.cat([first, second])
    assert isinstance(joined, LazyRows) and not joined.requires_grad
    torch.testing.assert_close(joined.logsumexp(-1), torch.cat([made_without(c, False)] * 2).logsumexp(-1))
    assert c.report.materialised_by == {}


@pytest.mark.parametrize("padded", [False, True])
def test_rows_that_are_selected_by_a_mask_of_full_width(padded: bool) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        wide = MASK.unsqueeze(-1).expand_as(x)
        s, t = (torch.masked_select(z, wide).view(-1, z.size(-1)) for z in (x, y))
        assert len(s) == int(MASK.sum())
        return kl(s, t.detach()) + x.masked_select(MASK[..., None]).reshape(-1, x.shape[-1]).logsumexp(-1).mean()

    assert_same([case(padded=padded), case(padded=padded)], loss, fused=True)
    assert_same(case(padded=padded), lambda x: x.masked_select(MASK[..., None]).sin().mean(), fused=False)
