"""Budgets that are found: what fits into memory, on trial steps that leave no trace."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import Tiny, fit, lengths, loader, report
from torch import Tensor

import lightning_liger.data.trial as trial
from lightning_liger import LigerCallback
from lightning_liger.data.budget import largest_budget
from lightning_liger.data.out_of_memory import BatchTooLarge, explained


@pytest.mark.parametrize(("fixed", "each", "limit"), [(0, 1.0, 50_000), (9_000, 0.4, 11_000), (100, 3.0, 1e6)])
def test_the_largest_budget_is_found_in_few_trials(fixed: float, each: float, limit: float) -> None:
    tried: list[int] = []

    def peak(budget: int) -> float | None:
        tried.append(budget)
        needs = fixed + each * budget * (1 + budget / 4e6)  # not quite a straight line
        return None if needs > 1.1 * limit else needs

    found = largest_budget(peak, start=2_000, least=500, most=10_000_000, limit=limit)
    assert 0.85 * limit <= fixed + each * found <= limit
    assert len(tried) <= 10


def test_a_budget_ends_at_the_longest_sample_and_at_all_there_is() -> None:
    def peak(budget: int) -> float:
        return budget

    assert largest_budget(peak, start=2_000, least=500, most=3_000, limit=1e9) >= 2_944
    assert largest_budget(peak, start=2_000, least=500, most=3_000, limit=600) in range(500, 600)
    with pytest.raises(ValueError, match="not even the longest sample, 500 tokens"):
        largest_budget(peak, start=2_000, least=500, most=3_000, limit=400)


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0


class Moody(Tiny):
    """Everything that a step may change beside gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout(0.5)
        self.calls, self.history, self.meter = 0, {"loss": [0.0]}, Meter()
        self.generator = torch.Generator().manual_seed(1)
        self.average = torch.zeros(())
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, self.numbers(batch)))
        loss = self.dropout(self.norm(self.table(batch["input_ids"].flatten()))).square().mean()
        self.calls += 1
        self.history["loss"].append(float(loss))
        self.meter.total, self.meter.count = self.meter.total + float(loss), self.meter.count + 1
        self.average.mul_(0.9).add_(loss.detach())
        self.log("loss", loss)
        self.drawn += [random.random(), float(np.random.rand()), float(torch.rand(1, generator=self.generator))]
        self.made_in_a_step = self.calls
        return loss


class FakeMemory:
    """Bytes of a device, from the samples that the batch on trial holds."""

    def __init__(self, device: Any) -> None:
        del device

    def available(self) -> float:
        return 100_000

    def begin(self) -> float:
        return 10_000

    def peak(self) -> float:
        return 10_000 + 400.0 * Watched.tokens


class Watched(Moody):
    tokens = 0
    trials = 0
    with_gradients: list[bool] = []  # noqa: RUF012

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Watched.tokens = int(batch["attention_mask"].sum())
        Watched.trials += 1
        Watched.with_gradients.append(all(p.grad is not None for p in self.parameters()))
        return super().training_step(batch, batch_idx)


def test_trials_are_the_fullest_batch_and_the_one_with_most_padding() -> None:
    lengths = np.append(np.full(4_000, 31), [700, 900])
    batches = [lengths[b] for b in trial.worst_batches(lengths, 1_000)]
    assert 960 <= max(b.sum() for b in batches) <= 1_000
    assert max(len(b) * b.max() for b in batches) >= 700 * 8  # the longest sample is nearly alone


def test_trials_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "memory_of", FakeMemory)
    found = fit(loader(), module=Watched(), budget="auto", max_epochs=1)
    tried = Watched.trials - len(found.seen)
    budget = report(found)["budget"]
    # less gradients; nothing for an optimizer without momentum
    parameters = sum(p.numel() for p in found.parameters())
    room = 0.85 * (0.95 * 100_000 - 10_000 - 4 * parameters)
    assert 0.9 * room <= 400 * (budget + 64) and 400 * budget <= room
    # as in the middle of a training, where those of the last step are there until backward begins
    assert Watched.with_gradients[:tried] == [True] * tried and found.table.weight.grad is not None
    assert tried >= 2 and f"of {tried} tried" in report(found)["found"]
    monkeypatch.undo()
    given = fit(loader(), module=Moody(), budget=budget, max_epochs=1)
    assert found.seen == given.seen and found.calls == given.calls == len(given.seen)
    assert found.history == given.history and vars(found.meter) == vars(given.meter)
    assert found.drawn == given.drawn and torch.equal(found.average, given.average)
    for (name, a), b in zip(found.state_dict().items(), given.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


class Failing(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise KeyError("made in on_train_start")


class Manual(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Writing(Tiny):
    """Averages a teacher's weights in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(2, 2).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)
        return loss


def test_what_cannot_be_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "memory_of", FakeMemory)
    for module, message in (
        (Failing(), "before training starts, and it failed with KeyError.*Give a number"),
        (Manual(), "steps its optimizers by itself.*Give a number"),
        (Writing(), r"writes parameters \(teacher.weight\).*Give a number"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(loader(), module=module, budget="auto")


def test_options() -> None:
    for bad in ("most", 0, True, 2.5):
        with pytest.raises(ValueError, match=r"max_tokens_per_batch=.*'auto' or 'keep_samples'"):
            LigerCallback(max_tokens_per_batch=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'keep_samples' finds a number that every sample fits into"):
        LigerCallback(max_tokens_per_batch="keep_samples", overlong="skip")


class Full(Tiny):
    """Runs out of memory in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


def test_a_batch_that_does_not_fit_is_named() -> None:
    module = Full()
    with pytest.raises(BatchTooLarge, match="Try max_tokens_per_batch=48") as caught:
        fit(loader(), module=module)
    batch = module.seen[-1][1]
    tokens = sum(lengths()[i] for i in batch)
    assert f"batch of {len(batch)} samples with {tokens} tokens" in str(caught.value)
    assert "under max_tokens_per_batch=64" in str(caught.value) and "2.00 GiB" in str(caught.value)
    assert type(caught.value.__cause__) is torch.OutOfMemoryError


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError):
        explained(lambda: {}["a"], lambda: "")()


class Asking(Watched):
    """Makes the loader before the checkpoint is read."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


@pytest.mark.parametrize("kind", [Watched, Asking])
def test_a_found_budget_is_resumed(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "memory_of", FakeMemory)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(loader(), module=kind(), budget="auto", callbacks=[saver], enable_checkpointing=True)
    # the device has less room now
    monkeypatch.setattr(FakeMemory, "available", lambda self: 70_000)
    again = fit(loader(), module=kind(), budget="auto", path=tmp_path / "step=3.ckpt")
    assert again.seen == whole.seen[3:]
    assert report(again)["budget"] == report(whole)["budget"]
    assert "as in the checkpoint" in report(again)["found"]


def test_another_budget_goes_on_with_the_rest(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(loader(), callbacks=[saver], enable_checkpointing=True)
    before = [i for _, numbers in whole.seen[:3] for i in numbers]
    for budget in (40, "keep_samples"):
        after = fit(loader(), budget=budget, path=tmp_path / "step=3.ckpt")
        assert report(after)["budget"] != 64
        assert sorted(before + [i for batch in after.epoch(0) for i in batch]) == list(range(60))
        assert sorted(i for batch in after.epoch(1) for i in batch) == list(range(60))
