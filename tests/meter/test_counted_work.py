"""What counts as a token, and when operations are counted anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Plain, causal_lm, fit, loader, real_tokens
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_liger import LigerCallback


class Distils(Plain):
    """A teacher of the same size reads every batch, and is not trained."""

    def __init__(self) -> None:
        super().__init__(causal_lm("llama"))
        self.teacher = causal_lm("llama", seed=1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            aim = self.teacher(**{**batch, "labels": None}).logits.softmax(-1)
        out = self.model(**batch)
        keep = batch["attention_mask"].bool()
        return out.loss + ((out.logits.softmax(-1) - aim)[keep] ** 2).sum()


def of(module: Any, **options: Any) -> dict[str, Any]:
    callback = LigerCallback(verbose=False)
    fit(module, loader(), callback, **options)
    return callback.report.to_dict()


def test_a_teachers_tokens_are_the_students() -> None:
    report = of(Distils())
    alone = of(Plain(causal_lm("llama")))
    seconds = real_tokens(loader()) / report["metrics"]["liger/tokens_per_second"]
    # 4 steps of the seconds that were measured: tokens are counted once, although two models have read them
    assert seconds == pytest.approx(4 * report["metrics"]["liger/step_seconds"], rel=1e-6)
    # the teacher runs forward only, which is a third of a training; its head is the same again
    ratio = report["meter"]["model_flops"] / alone["meter"]["model_flops"]
    assert 4 / 3 < ratio < 2.2, "the head is read by more rows than the loss of labels does"


class Thaws(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.model)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.model, optimizer)


def test_layers_that_thaw_count_from_then_on() -> None:
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": -1}
    whole, thawed = (
        of(Plain(causal_lm("llama")), **options),
        of(Plain(causal_lm("llama")), callbacks=[Thaws()], **options),
    )
    found, full = thawed["meter"], whole["meter"]
    # the first of two epochs is the forward of frozen layers, a third, beside a head that trains without an input gradient
    assert found["attention_flops"] == pytest.approx((1 / 3 + 1) / 2 * full["attention_flops"])
    assert 0.6 * full["model_flops"] < found["model_flops"] < 0.75 * full["model_flops"]


def test_accumulated_batches_are_one_step() -> None:
    report = of(Plain(causal_lm()), accumulate_grad_batches=2, max_steps=2)
    metrics = report["metrics"]
    assert metrics["liger/samples_per_second"] * metrics["liger/step_seconds"] == pytest.approx(8)
