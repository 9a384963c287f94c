"""Batches by token count in a Trainer: what every rank is given, over epochs and interruptions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import QUIET, causal_lm, collate, documents
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from lightning_liger import LigerCallback

BUDGET = 64


class Numbered(Dataset[Any]):
    """Documents that know their number."""

    def __init__(self, count: int = 60) -> None:
        self.rows = documents(count, seed=5)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return index, self.rows[index]


def numbered(samples: list[Any]) -> dict[str, Any]:
    return {**collate([row for _, row in samples]), "number": torch.tensor([i for i, _ in samples])}


class Module(L.LightningModule):
    """Writes down what it was given: ``(epoch, sample numbers, tokens)``."""

    def __init__(self, *, asks_for_steps: bool = False) -> None:
        super().__init__()
        self.asks_for_steps = asks_for_steps
        self.seen: list[tuple[int, list[int], int]] = []
        self.estimated: float = 0
        self.table = torch.nn.Embedding(128, 4)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        numbers = batch.pop("number").tolist()
        self.seen.append((self.current_epoch, numbers, int(batch["attention_mask"].sum())))
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def loss(self, batch: dict[str, Any]) -> Tensor:
        return self.table(batch["input_ids"]).square().mean()

    def configure_optimizers(self) -> Any:
        if self.asks_for_steps:
            self.estimated = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), 1e-2)


class Decoder(Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = causal_lm("qwen2")

    def loss(self, batch: dict[str, Any]) -> Tensor:
        return self.model(**batch).loss


def loader(**changes: Any) -> DataLoader[Any]:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "collate_fn": numbered, **changes}
    return DataLoader(Numbered(), **options)


def train(module: Module, data: Any, *, budget: int = BUDGET, path: Any = None, **options: Any) -> L.Trainer:
    L.seed_everything(3)
    given = {**QUIET, "max_steps": -1, "max_epochs": 2, **options}
    callback = LigerCallback(verbose=False, max_tokens_per_batch=budget)
    trainer = L.Trainer(callbacks=[callback, *given.pop("callbacks", [])], **given)
    trainer.fit(module, data, ckpt_path=path)
    return trainer


def by_epoch(module: Module, epoch: int) -> list[int]:
    return [i for e, numbers, _ in module.seen if e == epoch for i in numbers]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_once_an_epoch_within_the_budget(shuffle: bool) -> None:
    module = Decoder() if shuffle else Module()
    trainer = train(module, loader(shuffle=shuffle))
    assert [sorted(by_epoch(module, e)) for e in (0, 1)] == [list(range(60))] * 2
    assert max(tokens for _, _, tokens in module.seen) <= BUDGET
    assert sum(tokens for _, _, tokens in module.seen) / (len(module.seen) * BUDGET) > 0.9
    assert (by_epoch(module, 0) != by_epoch(module, 1)) or not shuffle
    assert trainer.num_training_batches * 2 == len(module.seen)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("asks_for_steps", [False, True])
def test_resumes_twice_where_it_stopped(tmp_path: Path, workers: int, asks_for_steps: bool) -> None:
    def data() -> DataLoader[Any]:
        return loader(num_workers=workers, persistent_workers=workers > 0)

    whole = Module(asks_for_steps=asks_for_steps)
    train(whole, data())
    steps = len(whole.seen)
    assert not asks_for_steps or whole.estimated == steps
    found: list[Any] = []
    path = None
    for stop in (2, steps // 2 + 3, steps):  # in the first epoch, in the second, at the end
        part = Module(asks_for_steps=asks_for_steps)
        trainer = train(part, data(), path=path, max_steps=stop, max_epochs=9)
        found += part.seen
        path = tmp_path / f"{stop}.ckpt"
        trainer.save_checkpoint(path)
    # Lightning counts an epoch that max_steps cut short as over, and so has another number for the next
    assert [s[1:] for s in found] == [s[1:] for s in whole.seen]


def test_resumes_from_checkpoints_that_training_wrote(tmp_path: Path) -> None:
    def saving(name: str) -> dict[str, Any]:
        saver = ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=3, save_top_k=-1)
        return {"callbacks": [saver], "enable_checkpointing": True}

    whole = Module()
    train(whole, loader(), **saving("a"))
    steps_per_epoch = len(whole.seen) // 2
    inside = tmp_path / "a" / "step=3.ckpt"
    again = Module()
    train(again, loader(), path=inside, **saving("b"))
    assert again.seen == whole.seen[3:]
    # a checkpoint of the resumed run, in its second epoch
    late = tmp_path / "b" / f"step={steps_per_epoch // 3 * 3 + 3}.ckpt"
    third = Module()
    train(third, loader(), path=late)
    assert third.seen == whole.seen[steps_per_epoch // 3 * 3 + 3 :]


def test_resumes_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    whole = Module()
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    train(whole, loader(), callbacks=[saver], enable_checkpointing=True)
    again = Module()
    train(again, loader(), path=tmp_path / "epoch=0.ckpt")
    assert again.seen == whole.seen[len(whole.seen) // 2 :]


def test_a_sampler_with_replacement_keeps_its_choice() -> None:
    weights = torch.arange(60).float() ** 2
    module = Module()
    train(module, loader(shuffle=False, sampler=WeightedRandomSampler(weights, 60)))
    for epoch in (0, 1):
        drawn = by_epoch(module, epoch)
        assert len(drawn) == 60
        assert max(Counter(drawn).values()) > 1
    assert max(tokens for _, _, tokens in module.seen) <= BUDGET


def test_the_report_says_what_became_of_the_batches() -> None:
    callback = LigerCallback(verbose=False, max_tokens_per_batch=BUDGET)
    L.Trainer(callbacks=[callback], **{**QUIET, "max_steps": 1}).fit(Module(), loader())
    found = callback.report.to_dict()["token_batches"]
    assert found["steps_before"] == 15 and found["steps"] < 15
    assert 0.9 < found["fill"] <= 1
    assert f"{found['steps']} steps per epoch instead of 15" in callback.report.render()


class Logging(Module):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        numbers = batch["number"].float()
        self.log("mean", numbers.mean(), on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)


def test_what_is_logged_counts_samples() -> None:
    """The mean over an epoch is that over its samples, whatever number of them a batch holds."""
    module = Logging()
    trainer = train(module, loader(), max_epochs=1)
    assert len({len(numbers) for _, numbers, _ in module.seen}) > 1
    assert float(trainer.callback_metrics["mean"]) == pytest.approx(59 / 2)


class Scheduled(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_schedules_end_with_the_training(accumulate: int) -> None:
    module = Scheduled()
    bar = L.pytorch.callbacks.TQDMProgressBar()
    trainer = train(module, loader(), callbacks=[bar], enable_progress_bar=True, accumulate_grad_batches=accumulate)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)
    assert bar.total_train_batches * 2 == len(module.seen)
    assert trainer.global_step == 2 * -(-bar.total_train_batches // accumulate)


def test_the_other_lightning() -> None:
    pl = pytest.importorskip("pytorch_lightning")

    class Theirs(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []
            self.table = torch.nn.Embedding(128, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append((self.current_epoch, batch["number"].tolist(), 0))
            return self.table.weight.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-2)

    module: Any = Theirs()
    callback = LigerCallback(verbose=False, max_tokens_per_batch=BUDGET)
    pl.Trainer(callbacks=[callback], **{**QUIET, "max_steps": -1, "max_epochs": 2}).fit(module, loader())
    assert [sorted(by_epoch(module, e)) for e in (0, 1)] == [list(range(60))] * 2


def test_samples_over_the_budget() -> None:
    with pytest.raises(ValueError, match=r"samples have more tokens than max_tokens_per_batch=20.*overlong='truncate'"):
        train(Module(), loader(), budget=20)
    for choice, expected in (("skip", 20), ("truncate", 20), ("own_batch", 24)):
        module = Module()
        callback = LigerCallback(verbose=False, max_tokens_per_batch=20, overlong=choice)
        L.Trainer(callbacks=[callback], **{**QUIET, "max_steps": -1, "max_epochs": 1}).fit(module, loader())
        assert max(tokens for _, _, tokens in module.seen) == expected
        over = callback.report.to_dict()["token_batches"]["overlong"]
        assert over > 0
        assert len(by_epoch(module, 0)) == 60 - (over if choice == "skip" else 0)


def test_options_without_a_budget_are_errors() -> None:
    with pytest.raises(ValueError, match=r"overlong=\.\.\. is about batches by tokens"):
        LigerCallback(overlong="skip")
    with pytest.raises(ValueError, match="max_tokens_per_batch=0"):
        LigerCallback(max_tokens_per_batch=0)


def test_batches_that_hold_no_tokens_name_the_remedy() -> None:
    def floats(samples: list[Any]) -> Any:
        return {"pixels": torch.zeros(len(samples), 3)}

    with pytest.raises(ValueError, match=r"length_fn=.*'pixels'|'pixels'.*length_fn="):
        train(Module(), loader(collate_fn=floats))


def test_a_length_function_decides() -> None:
    module = Module()
    callback = LigerCallback(verbose=False, max_tokens_per_batch=10, length_fn=lambda sample: 5)
    L.Trainer(callbacks=[callback], **{**QUIET, "max_steps": -1, "max_epochs": 1}).fit(module, loader())
    assert {len(numbers) for _, numbers, _ in module.seen} == {2}
