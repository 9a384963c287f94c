"""Every kind of training loader and of Trainer option: what the module is given, and how often."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from tiny import BUDGET, COUNT, Rows, Tiny, fit, flat, lengths, loader, masked, report, trainer
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

EVERYTHING = list(range(COUNT))


def test_nothing_is_dropped() -> None:
    module = fit(loader(drop_last=True))
    assert [sorted(flat(module.epoch(e))) for e in (0, 1)] == [EVERYTHING] * 2


def test_limits_cut_epochs_short() -> None:
    whole = len(fit(loader()).epoch(0))
    for limit, steps in ((3, 3), (0.5, whole // 2), (whole + 5, whole)):
        module = fit(loader(), limit_train_batches=limit)
        assert [len(module.epoch(e)) for e in (0, 1)] == [steps] * 2
    assert len(fit(loader(), fast_dev_run=True).seen) == 1
    assert len(fit(loader(), max_steps=3, max_epochs=None).seen) == 3


def test_overfitting_sees_the_same_batches_in_every_epoch() -> None:
    module = fit(loader(), overfit_batches=3, max_epochs=3)
    assert len(module.epoch(0)) == 3
    assert module.epoch(0) == module.epoch(1) == module.epoch(2)


def test_barebones() -> None:
    options = {"accelerator": "cpu", "max_epochs": 1, "barebones": True, "devices": 1}
    module = Tiny()
    from lightning_liger import LigerCallback

    ours = LigerCallback(verbose=False, max_tokens_per_batch=BUDGET, padding_free=False, fused_head=False)
    L.Trainer(callbacks=[ours], **options).fit(module, loader())
    assert sorted(flat(module.epoch(0))) == EVERYTHING


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return loader(num_workers=1, persistent_workers=True) if self.asked == 1 else loader()


def test_loaders_asked_for_in_every_epoch(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
    data = Data()
    whole = fit(data, callbacks=[saver], enable_checkpointing=True, **options)
    assert data.asked == 3
    assert [sorted(flat(whole.epoch(e))) for e in (0, 1, 2)] == [EVERYTHING] * 3
    steps = len(whole.epoch(0))
    again = fit(Data(), path=tmp_path / f"step={steps + 2}.ckpt", **options)
    assert again.seen == whole.seen[steps + 2 :]


def test_validation_comes_when_it_was_asked_for() -> None:
    val: Any = loader(8, shuffle=False)
    steps = len(fit(loader()).epoch(0))
    for every, expected in (
        (1.0, [steps - 1]),
        (0.5, [steps // 2 - 1, steps // 2 * 2 - 1]),
        (3, [*range(2, steps, 3)]),
    ):
        module = fit(loader(), val=val, val_check_interval=every, max_epochs=1)
        assert module.validated == expected, every


class Varying(Sampler[int]):
    """Another number of samples in each epoch."""

    def __init__(self) -> None:
        self.number = 0

    def set_epoch(self, epoch: int) -> None:
        self.number = epoch

    def __iter__(self) -> Iterator[int]:
        yield from range(COUNT - 20 * self.number)

    def __len__(self) -> int:
        return COUNT


def test_validation_follows_epochs_that_become_shorter() -> None:
    module = fit(loader(shuffle=False, sampler=Varying()), val=loader(8, shuffle=False), max_epochs=3)
    assert [sorted(flat(module.epoch(e))) for e in (0, 1, 2)] == [list(range(n)) for n in (60, 40, 20)]
    assert len(module.validated) == 3


class Both(Tiny):
    def numbers(self, batch: Any) -> Any:
        batch = batch[0] if isinstance(batch, tuple) else batch
        return [[] if b is None else b["number"].tolist() for b in batch]


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_two_loaders_at_once(mode: str, tmp_path: Path) -> None:
    def both() -> Any:
        return CombinedLoader([loader(), loader(30)], mode)

    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(both(), module=Both(), callbacks=[saver], enable_checkpointing=True)
    for e in (0, 1):
        long, short = (flat([pair[k] for pair in whole.epoch(e)]) for k in (0, 1))
        assert sorted(set(short)) == list(range(30))
        assert sorted(long) == EVERYTHING if mode != "min_size" else len(set(long)) == len(long) < COUNT
    steps = len(whole.epoch(0))
    again = fit(both(), module=Both(), path=tmp_path / f"step={steps - 1}.ckpt")
    assert again.seen == whole.seen[steps - 1 :]


class ByTwos(BatchSampler):
    """Batches of neighbours, in a random order."""

    def __iter__(self) -> Iterator[list[int]]:
        for i in torch.randperm(COUNT // 2).tolist():
            yield [2 * i, 2 * i + 1]


def test_a_batch_sampler_of_the_users_gives_the_order() -> None:
    sampler = ByTwos(RandomSampler(range(COUNT)), 2, False)
    module = fit(DataLoader(Rows(), batch_sampler=sampler, collate_fn=masked))
    assert [sorted(flat(module.epoch(e))) for e in (0, 1)] == [EVERYTHING] * 2


def test_another_process_without_a_seed_goes_on_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(loader(), callbacks=[saver], enable_checkpointing=True)
    steps = len(whole.epoch(0))
    assert fit(loader(), path=tmp_path / "step=3.ckpt", seed=77).seen == whole.seen[3:]
    assert fit(loader(), path=tmp_path / f"step={steps}.ckpt", seed=77).seen == whole.seen[steps:]


def test_a_second_fit(tmp_path: Path) -> None:
    ours = trainer()
    first, again = Tiny(), Tiny()
    ours.fit(first, loader())
    pickle.dumps(ours.callbacks[0])
    ours.fit_loop.max_epochs = 4
    ours.fit(again, loader())
    assert [sorted(flat(again.epoch(e))) for e in (2, 3)] == [EVERYTHING] * 2
    assert again.epoch(2) != first.epoch(0)
    path = tmp_path / "in_the_middle.ckpt"
    part = Tiny()
    stopped = trainer(max_steps=2)
    stopped.fit(part, loader())
    stopped.save_checkpoint(path)
    # a checkpoint that one fit was resumed from is nothing to the next
    resumed = trainer()
    resumed.fit(rest := Tiny(), loader(), ckpt_path=path)
    resumed.fit_loop.max_epochs = 3
    resumed.fit(last := Tiny(), loader())
    assert part.seen + rest.seen != [] and sorted(flat([numbers for _, numbers in last.seen])) == EVERYTHING


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "snapshot_every_n_steps": 3}])
def test_a_loader_with_a_state_of_its_own(options: dict[str, Any], tmp_path: Path) -> None:
    def stateful() -> Any:
        return loader(kind=StatefulDataLoader, **options)

    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(stateful(), callbacks=[saver], enable_checkpointing=True)
    assert [sorted(flat(whole.epoch(e))) for e in (0, 1)] == [EVERYTHING] * 2
    for step in (2, len(whole.epoch(0)) + 4):
        assert fit(stateful(), path=tmp_path / f"step={step}.ckpt").seen == whole.seen[step:]


def test_as_many_samples_per_step_as_before() -> None:
    module = fit(loader(batch_size=5), budget="keep_samples")
    assert len(module.epoch(0)) == len(module.epoch(1)) == COUNT // 5
    assert sorted(flat(module.epoch(0))) == EVERYTHING
    long = lengths()
    loads = [sum(long[i] for i in batch) for batch in module.epoch(0)]
    assert max(loads) <= 1.1 * sum(loads) / len(loads)
    assert report(module)["steps"] == report(module)["steps_before"] == 12
    assert "as many samples per step" in report(module)["found"]
    # on a CPU nobody knows what fits
    assert fit(loader(batch_size=5), budget="auto").seen == module.seen
