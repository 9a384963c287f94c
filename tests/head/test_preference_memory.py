"""Preference losses on a policy and a reference: what plain code gives, and no tensor of the size of the logits."""

from __future__ import annotations

import pytest
from lazy_cases import assert_same, case
from preference_losses import LOSSES, Loss
from test_memory import BATCH, LABELS, LENGTH, VOCAB, WIDTH, Largest
from torch import Tensor


def labels() -> Tensor:
    found = LABELS.clone()
    found[:, : LENGTH // 3] = -100
    found[1, -9:] = -100
    return found


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_preference_losses(loss: Loss) -> None:
    policy, reference = (case(batch=BATCH, length=LENGTH, width=WIDTH, vocab=VOCAB, bias=False, seed=s) for s in (0, 2))
    assert_same([policy, reference], lambda p, r: loss(p, r, LABELS, labels()), 1e-5, fused=True)
    x, y = policy.lazy(), reference.lazy()
    with Largest() as largest:
        loss(x, y, LABELS, labels()).backward()
    assert 0 < largest.numel < BATCH * LENGTH * VOCAB / 3, (largest.numel, largest.by)
