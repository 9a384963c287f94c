"""However a module computes its loss or feeds its model: plain and accelerated training are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as PL
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from helpers import (
    PAD,
    VOCAB,
    Plain,
    assert_engaged,
    assert_same,
    both,
    causal_lm,
    collate,
    collate_left,
    collate_shifted,
    collate_tuple,
    loader,
)

Step = Callable[[Any, Any], Any]


def attribute(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def first_item(model: Any, batch: Any) -> Any:
    return model(**batch)[0]


def by_name(model: Any, batch: Any) -> Any:
    return model(**batch)["loss"]


def plain_tuple(model: Any, batch: Any) -> Any:
    return model(**batch, return_dict=False)[0]


def keywords(model: Any, batch: Any) -> Any:
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    return out.loss


def positionals(model: Any, batch: Any) -> Any:
    between = () if isinstance(model, transformers.Qwen2ForCausalLM) else (None,)  # GPT-2 takes its cache second
    return model(batch["input_ids"], *between, batch["attention_mask"], labels=batch["labels"]).loss


def shifted_in_step(model: Any, batch: Any) -> Any:
    labels = batch.pop("labels")
    logits = model(**batch).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1))


def shifted_contiguous(model: Any, batch: Any) -> Any:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = batch["labels"][..., 1:].contiguous()
    loss = nn.CrossEntropyLoss()
    return loss(shift_logits.view(-1, VOCAB), shift_labels.view(-1))


def ignores_pad(model: Any, batch: Any) -> Any:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    loss = nn.CrossEntropyLoss(ignore_index=PAD)
    return loss(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def transposed(model: Any, batch: Any) -> Any:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


def unreduced(model: Any, batch: Any) -> Any:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    weight = (batch["labels"][:, 1:] != -100).float()
    return (losses * weight).sum() / weight.sum()


def smoothed(model: Any, batch: Any) -> Any:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], label_smoothing=0.1)


def pre_shifted(model: Any, batch: Any) -> Any:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch["targets"].view(-1))


def from_tuple(model: Any, batch: Any) -> Any:
    ids, mask, labels = batch
    return model(ids, attention_mask=mask, labels=labels).loss


STEPS: list[tuple[Step, Any]] = [
    (attribute, collate),
    (first_item, collate),
    (by_name, collate),
    (plain_tuple, collate),
    (keywords, collate),
    (positionals, collate),
    (shifted_in_step, collate),
    (shifted_contiguous, collate),
    (ignores_pad, collate),
    (transposed, collate),
    (unreduced, collate),
    (smoothed, collate),
    (pre_shifted, collate_shifted),
    (from_tuple, collate_tuple),
]


class Stepping(Plain):
    """One way to write a ``training_step``."""

    def __init__(self, step: Step, model: nn.Module) -> None:
        super().__init__(model)
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(self.model, batch)
        self.log("train_loss", loss)
        return {"loss": loss} if self.step is by_name else loss


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
@pytest.mark.parametrize(("step", "function"), STEPS, ids=[s.__name__ for s, _ in STEPS])
def test_loss_style(step: Step, function: Any, kind: str) -> None:
    plain, ours = both(lambda: Stepping(step, causal_lm(kind)), lambda: loader(function))
    assert_same(plain, ours)
    assert_engaged(ours)
    assert plain.metrics["train_loss"] == pytest.approx(ours.metrics["train_loss"], rel=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("side", [collate, collate_left], ids=["right", "left"])
def test_architecture_and_side(kind: str, side: Any) -> None:
    plain, ours = both(lambda: Stepping(shifted_contiguous, causal_lm(kind)), lambda: loader(side))
    assert_same(plain, ours)
    assert_engaged(ours)


# -- the Trainer's options -------------------------------------------------------------------------------------------


class OldTree(PL.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = causal_lm()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)


def test_pytorch_lightning_trainer() -> None:
    plain, ours = both(OldTree, loader, tree=PL)
    assert_same(plain, ours)
    assert_engaged(ours)


@pytest.mark.parametrize("step", [attribute, shifted_contiguous])
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3, "max_steps": 2},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "max_steps": 3, "max_epochs": 3},
    ],
    ids=["accumulate", "clip norm", "clip value", "accumulate and clip"],
)
def test_trainer_options(step: Step, options: dict[str, Any]) -> None:
    plain, ours = both(lambda: Stepping(step, causal_lm()), lambda: loader(count=24), **options)
    assert len(ours.gradients) == options.get("max_steps", 4)
    assert_same(plain, ours)
    assert_engaged(ours)


def test_adamw_takes_the_same_steps() -> None:
    class Adam(Stepping):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 3e-3)

    plain, ours = both(lambda: Adam(attribute, causal_lm("llama")), lambda: loader(count=32), max_steps=8)
    # AdamW turns the sign of a gradient of 1e-9 into a full step, so single weights may part
    assert_same(plain, ours, gradient=1e-4, parameter=1e-4)
    assert_engaged(ours)


class Manual(Stepping):
    def __init__(self) -> None:
        super().__init__(attribute, causal_lm())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.step(self.model, batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


def test_manual_optimization() -> None:
    plain, ours = both(Manual, loader)
    assert_same(plain, ours)
    assert_engaged(ours)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_gradient_checkpointing(kind: str, reentrant: bool) -> None:
    def make() -> Any:
        model = causal_lm(kind)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return Stepping(attribute, model)

    plain, ours = both(make, loader)
    assert_same(plain, ours)
    assert_engaged(ours)
