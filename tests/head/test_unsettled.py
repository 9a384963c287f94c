"""Per-position results over padding: masks keep them packed, readers of padding get the padded run's values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lazy_cases import assert_same, case
from torch import Tensor

BATCH, LENGTH, VOCAB = 3, 5, 9
IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB
SEEDS = (0, 1)  # right and left padding


def real(seed: int) -> Tensor:
    mask = case(padded=True, seed=seed).mask
    assert mask is not None
    return mask


def picked(x: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1)


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times": lambda x, m: (picked(x) * m).sum(-1),
    "times float": lambda x, m: (m.double() * -picked(x).exp()).sum(),
    "in part": lambda x, m: (picked(x)[:, :-1].contiguous().view(-1) * m[:, :-1].reshape(-1)).sum(),
    "index": lambda x, m: picked(x)[m].mean(),
    "masked_select": lambda x, m: picked(x).masked_select(m).std(),
    "masked_fill": lambda x, m: picked(x).masked_fill(~m, 0.0).square().sum(),
    "where": lambda x, m: torch.where(m, picked(x), torch.zeros((), dtype=x.dtype)).sum(),
    "two results": lambda x, m: ((picked(x) - x.logsumexp(-1)) * m).sum() + (x.amax(-1) * m).mean(),
    "row by row": lambda x, m: torch.stack([(r * k).sum() for r, k in zip(picked(x), m, strict=True)]),
    "accuracy": lambda x, m: ((x.argmax(-1) == IDS) & m).sum(),
    "accuracy selected": lambda x, m: (x.argmax(dim=-1).eq(IDS)[m]).double().mean(),
    "ids selected": lambda x, m: x.topk(2).indices[m],
    "normalised by hand": lambda x, m: (
        (x - x.logsumexp(-1, keepdim=True)).gather(-1, IDS[..., None])[..., 0] * m
    ).sum(),
    "confidence of predictions": lambda x, m: (x.softmax(-1).gather(-1, x.argmax(-1)[..., None])[..., 0] * m).sum(),
    "losses": lambda x, m: (F.cross_entropy(x.transpose(1, 2), IDS, reduction="none") * m).sum() / m.sum(),
    "distance": lambda x, m: F.kl_div(x.log_softmax(-1), (2 * x).softmax(-1), reduction="none").sum(-1)[m].mean(),
    "masked distance": lambda x, m: (
        ((x.softmax(-1) * x.log_softmax(-1)) * m.unsqueeze(-1)).sum(-1).masked_fill(~m, 0.0)
    ),
}

READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, m: picked(x).mean(),
    "softmax over positions": lambda x, m: picked(x).softmax(-1),
    "half masked": lambda x, m: (picked(x) * (IDS % 2 == 0)).sum(),
    "sorted": lambda x, m: picked(x).sort(-1).values,
    "ids": lambda x, m: x.argmax(-1),
    "losses": lambda x, m: F.cross_entropy(x.transpose(1, 2), IDS, reduction="none").mean(1),
    "written": lambda x, m: picked(x).mul_(2.0).sum(),
    "set": lambda x, m: _with_written(picked(x), m),
    "set in a view": lambda x, m: _with_written_view(picked(x)),
    "numbers": lambda x, m: torch.tensor(picked(x).tolist()),
    "expression": lambda x, m: (x - x.logsumexp(-1, keepdim=True)).square().mean(),
}


def _with_written(values: Tensor, mask: Tensor) -> Tensor:
    values = values * 1.0
    values[~mask] = 0.5
    return values.square().sum() + values[0].sum()


def _with_written_view(values: Tensor) -> Tensor:
    values = values * 1.0
    row, other = values[1], values[:, 1]
    row.mul_(3.0)
    return values.square().sum() + other.sum() + row.sum()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", list(MASKED))
def test_masks_keep_padding_out(name: str, seed: int) -> None:
    c, mask = case(padded=True, seed=seed), real(seed)
    assert_same(c, lambda x: MASKED[name](x, mask), fused=True)
    assert c.plain.reads == []


METRICS = {
    "perplexity": torchmetrics.text.Perplexity(ignore_index=-100),
    "accuracy": torchmetrics.classification.MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100),
    "top 3": torchmetrics.classification.MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100, top_k=3),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", list(METRICS))
def test_torchmetrics(name: str, padded: bool) -> None:
    c = case(padded=padded)
    labels = IDS if c.mask is None else IDS.masked_fill(~c.mask, -100)

    def function(x: Tensor) -> Tensor:
        x = x.detach()
        flat = (x, labels) if name == "perplexity" else (x.reshape(-1, VOCAB), labels.reshape(-1))
        found: Tensor = METRICS[name](*flat)
        return found

    if name == "top 3":  # it writes into what it is given
        assert_same(c, function, 1e-6)
    else:
        assert_same(c, function, 1e-6, fused=True)
        assert c.plain.reads == []


def test_distributions() -> None:
    def function(x: Tensor) -> Tensor:
        distribution = torch.distributions.Categorical(logits=x)
        return distribution.log_prob(IDS).sum() - 0.01 * distribution.entropy().mean()

    assert_same(case(), function, fused=True)


def test_guards_against_bad_numbers() -> None:
    for function in (
        lambda x: torch.isnan(x).any(),
        lambda x: x.isfinite().all(-1),
        lambda x: (x == x).all(),
        lambda x: (x > 0.5).any(dim=-1, keepdim=True),
        lambda x: (x.softmax(-1) > 0.3).sum(-1),
        lambda x: (x < x.amax(-1, keepdim=True)).double().mean(),
    ):
        assert_same(case(), function, fused=True)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", list(READ))
def test_readers_of_padding_get_the_padded_run(name: str, seed: int) -> None:
    c, mask = case(padded=True, seed=seed), real(seed)
    assert_same(c, lambda x: READ[name](x, mask))
    assert c.plain.reads


def test_a_look_without_gradients_leaves_the_graph() -> None:
    def function(x: Tensor) -> Tensor:
        values = picked(x)
        with torch.no_grad():
            assert float(values.mean()) < 0
        return values.square().mean()

    assert_same(case(padded=True), function, fused=True)
