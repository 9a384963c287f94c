"""Decoders in plain PyTorch, trained as they are and accelerated: padding goes where that is right, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import decoder_models as models
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import (
    VOCAB,
    Document,
    Plain,
    Run,
    assert_same,
    both,
    collate,
    collate_left,
    collate_shifted,
    loader,
)
from torch import Tensor


class Trains(Plain):
    """A decoder that nobody has told anything, and a function from ``(module, batch)`` to a loss."""

    def __init__(self, make: Callable[[], nn.Module], step: Callable[[Any, Any], Tensor]) -> None:
        torch.manual_seed(0)
        super().__init__(make(), lr=0.1)
        self.step = step
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(1.5)  # attention that cares about what it attends to

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(self, batch))


def loss_inside(module: Any, batch: Any) -> Tensor:
    return module.model(batch["input_ids"], batch["targets"])[1]


def loss_outside(module: Any, batch: Any) -> Tensor:
    found = module.model(batch["input_ids"])
    logits = found["logits"] if isinstance(found, dict) else found
    return F.cross_entropy(logits.reshape(-1, VOCAB), batch["targets"].reshape(-1), ignore_index=-100)


def run(make: Callable[[], nn.Module], step: Any = loss_inside, function: Any = collate_shifted, **options: Any) -> Run:
    """The accelerated run, equal to the plain one."""
    plain, ours = both(lambda: Trains(make, step), lambda: loader(function), **options)
    assert_same(plain, ours)
    return ours


def assert_packed(ours: Run, calls: int = 4) -> None:
    padding = ours.report["padding_free"]
    assert padding["packed_calls"] == padding["calls"] == calls, padding
    assert padding["extra_padded_runs"] == 0 and padding["applied"] == padding["found"] == 1, padding


def assert_left(ours: Run, reason: str) -> None:
    padding = ours.report["padding_free"]
    assert padding["packed_calls"] == 0 and any(reason in text for text in padding["off"]), padding


# -- packed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_nano_gpt(reentrant: bool | None) -> None:
    ours = run(lambda: models.NanoGPT(reentrant=reentrant))
    assert_packed(ours)
    assert ours.report["fused_head"]["fused_calls"] == 4
    assert ours.report["fused_head"]["skipped_fraction"] > 0.3


@pytest.mark.parametrize("attend", [models.windowed, models.with_alibi])
def test_masks_that_stay_inside_of_documents(attend: Any) -> None:
    assert_packed(run(lambda: models.NanoGPT(attend)))


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", ["passed", "complex", "inside"])
def test_llama(kind: str, reentrant: bool | None) -> None:
    assert_packed(run(lambda: models.Llama(kind, reentrant), loss_outside))


@pytest.mark.parametrize("make", [models.Residual, models.InSequence, models.Einsums, models.CausalMasked])
def test_habits(make: Any) -> None:
    assert_packed(run(make, loss_outside))


def test_the_sequence_comes_first() -> None:
    assert_packed(run(models.SequenceFirst))


def with_mask(inverted: bool, dtype: torch.dtype) -> Any:
    def step(module: Any, batch: Any) -> Tensor:
        mask = batch["attention_mask"].bool()
        logits = module.model(batch["input_ids"], (~mask if inverted else mask).to(dtype))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return step


@pytest.mark.parametrize("function", [collate, collate_left], ids=["right", "left"])
@pytest.mark.parametrize(("inverted", "additive"), [(False, False), (True, False), (False, True)])
def test_padding_masks(inverted: bool, additive: bool, function: Any) -> None:
    step = with_mask(inverted, torch.bool if inverted else torch.int64)
    assert_packed(run(lambda: models.Masked(inverted, additive), step, function))


def test_hidden_states_are_read_by_index() -> None:
    class Value(models.Backbone):
        def __init__(self) -> None:
            super().__init__("inside")
            self.value = nn.Linear(models.WIDTH, 1)

    def step(module: Any, batch: Any) -> Tensor:
        hidden = module.model(batch["input_ids"]).hidden
        last = hidden[torch.arange(len(hidden)), batch["attention_mask"].sum(1) - 1]
        return module.model.value(last).square().mean()

    assert_packed(run(Value, step))


def test_the_module_is_the_decoder() -> None:
    class Itself(Plain):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(lr=0.1)
            self.wte = nn.Embedding(VOCAB, models.WIDTH)
            self.blocks = nn.ModuleList(models.Block() for _ in range(2))
            self.head = nn.Linear(models.WIDTH, VOCAB)

        def forward(self, x: Tensor) -> Tensor:
            h = self.wte(x)
            for block in self.blocks:
                h = block(h)
            return self.head(h)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch["input_ids"]).transpose(1, 2), batch["targets"])

    plain, ours = both(Itself, lambda: loader(collate_shifted))
    assert_same(plain, ours)
    assert_packed(ours)


def test_slices_of_the_batch() -> None:
    def step(module: Any, batch: Any) -> Tensor:
        ids = batch["input_ids"]
        return module.model(ids[:, :-1], torch.where(batch["attention_mask"] == 1, ids, -100)[:, 1:].contiguous())[1]

    class Contiguous(models.NanoGPT):
        def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
            return super().forward(idx, targets)

    assert_packed(run(Contiguous, step, collate))


# -- left as they are --------------------------------------------------------------------------------------------------

LEFT = [
    (lambda: models.NanoGPT(models.by_hand), "a matrix product of its own"),
    (lambda: models.NanoGPT(models.by_einsum), "einsum"),
    (lambda: models.NanoGPT(models.looking_ahead), "looks ahead"),
    (models.Statistics, "over all tokens"),
    (models.Keeping, "keeps hidden states"),
    (models.OwnFunction, "an autograd function of its own"),
    (models.Convolution, "conv1d"),
]


@pytest.mark.parametrize(("make", "reason"), LEFT, ids=[r for _, r in LEFT])
def test_left_padded(make: Any, reason: str) -> None:
    assert_left(run(make), reason)


def test_losses_over_padding_are_left_padded() -> None:
    def step(module: Any, batch: Any) -> Tensor:
        return module.model(batch["input_ids"], batch["input_ids"].roll(-1, 1))[1]

    ours = run(models.NanoGPT, step, collate)
    assert_left(ours, "the loss reads padded positions")


def test_losses_over_padding_outside_of_the_decoder() -> None:
    def step(module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module.model(batch["input_ids"]).flatten(0, 1), batch["input_ids"].flatten())

    padding = run(lambda: models.Llama("inside"), step, collate).report["padding_free"]
    assert padding["packed_calls"] == padding["extra_padded_runs"] == 1
    assert any("reads padded positions" in text for text in padding["off"]), padding


def test_padding_on_the_left_that_is_attended_to() -> None:
    ours = run(lambda: models.Llama("inside"), loss_of_labels, collate_left)
    assert ours.report["padding_free"]["packed_calls"] == 0


def loss_of_labels(module: Any, batch: Any) -> Tensor:
    logits = module.model(batch["input_ids"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def test_no_padding() -> None:
    def equal(batch: list[Document]) -> Any:
        return collate_shifted([Document(torch.arange(3, 15) + d.prompt, 2) for d in batch])

    padding = run(models.NanoGPT, function=equal).report["padding_free"]
    assert padding["packed_calls"] == 0
    assert padding["off"] == ["no attention_mask was passed, and rows do not end in a repeated token"]
