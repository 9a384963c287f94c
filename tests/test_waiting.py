"""No step asks the device for a value: the CPU knows which rows count, wherever the labels come from the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_device import Device, emulated_device
from helpers import (
    PAD,
    VOCAB,
    Plain,
    assert_engaged,
    assert_same,
    causal_lm,
    collate,
    collate_shifted,
    collate_tuple,
    fit,
    loader,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from transformers import BatchEncoding

from lightning_liger import LigerCallback

Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def _logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def hf_labels(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def hf_num_items(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, num_items_in_batch=(batch["labels"][:, 1:] != -100).sum()).loss


def shifted_by_hand(model: Any, batch: dict[str, Tensor]) -> Tensor:
    shift_logits = _logits(model, batch)[..., :-1, :].contiguous()
    shift_labels = batch["labels"][..., 1:].contiguous()
    return F.cross_entropy(shift_logits.view(-1, VOCAB), shift_labels.view(-1).to(shift_logits.device))


def transposed(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(_logits(model, batch)[:, :-1].transpose(1, 2), batch["labels"][:, 1:], label_smoothing=0.1)


def from_ids(model: Any, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["input_ids"].clone()
    labels[batch["attention_mask"] == 0] = -100
    labels = torch.where(batch["labels"] == -100, -100, labels)
    return F.cross_entropy(_logits(model, batch)[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


def written_in_place(model: Any, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"]
    labels[labels == -100] = PAD
    labels[:, 0] = PAD
    return F.cross_entropy(
        _logits(model, batch)[:, :-1].flatten(0, 1), labels[:, 1:].flatten().long(), ignore_index=PAD
    )


def filled(model: Any, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"].masked_fill(~batch["attention_mask"].bool(), -100)
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(_logits(model, batch).view(-1, VOCAB), labels.reshape(-1))


def masked_sum(model: Any, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"][:, 1:].clone()
    mask = (labels != -100).float()
    labels[labels == -100] = 0
    logp = _logits(model, batch)[:, :-1].log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -(logp * mask).sum() / mask.sum()


def each_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = _logits(model, batch)[:, :-1], batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="none")
    return loss.view(labels.shape).sum() / (labels != -100).sum()


def selected(model: Any, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"][:, 1:]
    keep = labels != -100
    return F.cross_entropy(_logits(model, batch)[:, :-1][keep], labels[keep])


def accuracy(model: Any, batch: dict[str, Tensor]) -> Tensor:
    out = model(**batch)
    labels = batch["labels"][:, 1:]
    keep = labels != -100
    model.right = ((out.logits[:, :-1].argmax(-1) == labels) & keep).sum() / keep.sum()
    return out.loss


LOSSES: list[Loss] = [
    hf_labels,
    hf_num_items,
    shifted_by_hand,
    transposed,
    from_ids,
    written_in_place,
    filled,
    masked_sum,
    each_loss,
    selected,
    accuracy,
]


class Step(Plain):
    def __init__(self, loss: Loss) -> None:
        super().__init__(causal_lm())
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.model, batch)


class Emulated(SingleDeviceStrategy):
    """One device that is not the CPU as far as anybody can tell, and that nobody may wait for."""

    def __init__(self, device: Device) -> None:
        super().__init__(device="cpu")
        self.emulated = device

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.emulated.batch(batch)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.lightning_module.parameters():
            self.emulated.mark(parameter)
        with self.emulated.forbidden_to_wait():
            return super().training_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        with self.emulated.forbidden_to_wait():
            return super().backward(*args, **kwargs)


class Lenient(Emulated):
    """The same, where waiting is allowed."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return SingleDeviceStrategy.training_step(self, *args, **kwargs)


@dataclass
class Batch:
    """A batch that is neither a dict nor a tuple."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_no_step_waits(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fit(Step(loss), loader())
    with emulated_device(monkeypatch) as device:
        ours = fit(Step(loss), loader(), LigerCallback(verbose=False), strategy=Emulated(device), accelerator="auto")
    assert_same(plain, ours)
    assert_engaged(ours)
    assert ours.report["fused_head"]["off"] == []
    if loss is not selected:  # which leaves the choice to the step
        assert ours.report["fused_head"]["skipped_fraction"] > 0.2


def test_filler_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fit(Step(hf_labels), loader())
    callback = LigerCallback(verbose=False, shape_buckets=[64, 128])
    with emulated_device(monkeypatch) as device:
        ours = fit(Step(hf_labels), loader(), callback, strategy=Emulated(device), accelerator="auto")
    assert_same(plain, ours)
    assert ours.report["padding_free"]["filler_fraction"] > 0


def test_batches_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_tuple(model: Any, batch: Any) -> Tensor:
        return shifted_by_hand(model, dict(zip(("input_ids", "attention_mask", "labels"), batch, strict=True)))

    def from_object(model: Any, batch: Any) -> Tensor:
        return hf_labels(model, vars(batch))

    def before_shift(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(_logits(model, batch).view(-1, VOCAB), batch["targets"].view(-1))

    def as_object(documents: Any) -> Any:
        return Batch(**collate(documents))

    def as_encoding(documents: Any) -> Any:
        return BatchEncoding(collate(documents))

    for loss, function in (
        (from_tuple, collate_tuple),
        (before_shift, collate_shifted),
        (from_object, as_object),
        (hf_labels, as_encoding),
    ):
        plain = fit(Step(loss), loader(function))
        with emulated_device(monkeypatch) as device:
            ours = fit(
                Step(loss),
                loader(function),
                LigerCallback(verbose=False),
                strategy=Emulated(device),
                accelerator="auto",
            )
        assert_same(plain, ours)
        assert_engaged(ours)
        assert ours.report["fused_head"]["off"] == []


def test_labels_from_elsewhere_are_read_back_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfollowed(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**{**batch, "labels": torch.as_tensor(batch["labels"].double().mul(1.0).long())}).loss

    plain = fit(Step(unfollowed), loader())
    with emulated_device(monkeypatch) as device:
        ours = fit(
            Step(unfollowed), loader(), LigerCallback(verbose=False), strategy=Lenient(device), accelerator="auto"
        )
    assert_same(plain, ours)
    assert_engaged(ours)
    assert "waits for the device" in ours.report["fused_head"]["off"][0]


class Copying(SingleDeviceStrategy):
    """Batches are copied, as to a device; compiled code runs as anywhere."""

    def __init__(self) -> None:
        super().__init__(device="cpu")

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return apply_to_collection(batch, Tensor, Tensor.clone)


def test_compiled_functions_see_ordinary_tensors() -> None:
    def prepared(labels: Tensor) -> Tensor:
        labels = labels[:, 1:].flatten()
        return labels.where(labels != PAD, -100)

    def compiled(model: Any, batch: dict[str, Tensor]) -> Tensor:
        labels = model.prepared(batch["labels"])
        return F.cross_entropy(_logits(model, batch)[:, :-1].flatten(0, 1), labels)

    def out_of_sight(model: Any, batch: dict[str, Tensor]) -> Tensor:
        labels = elsewhere.prepared(batch["labels"])
        return F.cross_entropy(_logits(model, batch)[:, :-1].flatten(0, 1), labels)

    elsewhere = SimpleNamespace(prepared=torch.compile(prepared, backend="aot_eager"))
    for loss in (compiled, out_of_sight):
        runs = []
        for callback in (None, LigerCallback(verbose=False)):
            step = Step(loss)
            step.model.prepared = torch.compile(prepared, backend="aot_eager", fullgraph=True)
            if loss is out_of_sight:
                del step.model.prepared
            runs.append(fit(step, loader(), callback, strategy=Copying(), accelerator="auto"))
        assert_same(*runs)
        assert_engaged(runs[1])


def test_labels_outside_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any, batch: dict[str, Tensor]) -> Tensor:
        batch["labels"][0, -2:] = VOCAB
        return model(**batch).loss

    with emulated_device(monkeypatch) as device, pytest.raises(IndexError, match=f"label {VOCAB} is outside"):
        fit(Step(wrong), loader(), LigerCallback(verbose=False), strategy=Emulated(device), accelerator="auto")
