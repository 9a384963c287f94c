"""Losses of public modules: plain and accelerated are the same, and logits are never computed in full."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import Plain, assert_engaged, assert_same, both, causal_lm, loader
from wild_losses import LOSSES


class Module(Plain):
    def __init__(self, loss: Any) -> None:
        super().__init__(causal_lm("llama"), 0.05)
        self.loss = loss
        self.val: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val.append(float(self.loss(self, batch)))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_training_and_validation(loss: Any) -> None:
    made: list[Module] = []

    def make() -> Module:
        made.append(Module(loss))
        return made[-1]

    plain, ours = both(make, loader, val=loader, limit_val_batches=1)
    assert_same(plain, ours)
    assert made[1].val == pytest.approx(made[0].val, rel=1e-5) and made[0].val
    for name, value in plain.metrics.items():
        if not name.startswith("liger/"):
            assert ours.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert_engaged(ours)
    assert ours.report["fused_head"]["materialised_by"] == {}
