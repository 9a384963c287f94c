"""Tokens per second, padding and memory: right, in every logger, at no cost to what the Trainer does."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import pytorch_lightning as PL
import torch
from helpers import Plain, assert_engaged, assert_same, both, causal_lm, collate, fit, loader, real_tokens
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader

from lightning_liger import LigerCallback
from lightning_liger.meter import meter
from lightning_liger.report import Report

NAMES = {
    "liger/tokens_per_second",
    "liger/samples_per_second",
    "liger/step_seconds",
    "liger/padding_fraction",
    "liger/peak_memory_gb",
}
NAMES |= {f"liger/{phase}_fraction" for phase in ("data_wait", "forward", "backward", "optimizer", "other")}
LATER = {"liger/mfu", "liger/hfu", "liger/loss_std", "liger/loss_spikes"}  # from the second batch on


class Clock:
    """``time.perf_counter`` under a test's control."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: self.now))


class Ticking(Plain):
    """Each training step takes two seconds, each validation step a thousand."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(causal_lm())
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 2
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 1000
        self.model(**batch)


def _rows(folder: Path, name: str) -> list[tuple[int, float]]:
    with open(next(folder.rglob("metrics.csv"))) as file:
        return [(int(r["step"]), float(r[name])) for r in csv.DictReader(file) if r.get(name)]


def test_rates_against_tokens_counted_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    data = loader(count=24)
    callback = LigerCallback(verbose=False)
    logger = CSVLogger(tmp_path)
    options: dict[str, Any] = {"log_every_n_steps": 2, "val_check_interval": 3, "num_sanity_val_steps": 2}
    fit(Ticking(clock), data, callback, val=loader(), max_steps=6, logger=logger, **options)
    batches = list(data)
    pairs = [batches[i : i + 2] for i in (0, 2, 4)]
    # the validation after step 3 lies inside the second window
    expected = [(i * 2 + 1, real_tokens(pair) / 4) for i, pair in enumerate(pairs)]
    found = _rows(tmp_path, "liger/tokens_per_second")
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [v for _, v in found] == pytest.approx([v for _, v in expected], rel=1e-6)
    shares = [1 - real_tokens(pair) / sum(b["input_ids"].numel() for b in pair) for pair in pairs]
    assert [v for _, v in _rows(tmp_path, "liger/padding_fraction")] == pytest.approx(shares, rel=1e-5)
    # the report's are about the whole training
    assert callback.report.metrics["liger/tokens_per_second"] == pytest.approx(real_tokens(batches) / 12)
    assert 0.01 < callback.report.metrics["liger/peak_memory_gb"] < 100


@pytest.mark.parametrize("tree", [L, PL], ids=["lightning", "pytorch_lightning"])
def test_every_logger_and_the_progress_bar(tree: Any, tmp_path: Path) -> None:
    from importlib import import_module

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = import_module("lightning.pytorch.loggers" if tree is L else "pytorch_lightning.loggers")
    module: Any = Plain(causal_lm()) if tree is L else _old_tree()
    made = [loggers.CSVLogger(tmp_path / "csv"), loggers.TensorBoardLogger(tmp_path / "tb")]
    run = fit(module, loader(), LigerCallback(verbose=False), tree=tree, logger=made, log_every_n_steps=2)
    assert run.metrics.keys() >= NAMES
    bar = {name for name in run.trainer.progress_bar_metrics if name.startswith("liger/")}
    assert bar == {"liger/tokens_per_second", "liger/mfu"}
    for name in NAMES | LATER:
        assert len(_rows(tmp_path / "csv", name)) == 2
    events = EventAccumulator(str(next((tmp_path / "tb").rglob("events*")).parent))
    events.Reload()
    for name in NAMES | LATER:
        assert [e.step for e in events.Scalars(name)] == [1, 3]


def _old_tree() -> Any:
    class Old(PL.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = causal_lm()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Old()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        # epochs of two steps, shorter than the interval: Lightning counts steps over epochs
        ({"count": 8, "log_every_n_steps": 3, "max_steps": 7, "max_epochs": 9}, [2, 5]),
        # an interval counts optimizer steps, not micro-batches
        ({"count": 64, "log_every_n_steps": 2, "max_steps": 5, "accumulate_grad_batches": 3}, [1, 3]),
    ],
    ids=["short epochs", "accumulation"],
)
def test_nothing_is_logged_where_lightning_drops_it(options: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    data = loader(count=options.pop("count"))
    callback = LigerCallback(verbose=False)
    fit(Plain(causal_lm()), data, callback, logger=CSVLogger(tmp_path), **options)
    assert [step for step, _ in _rows(tmp_path, "liger/tokens_per_second")] == steps


def test_a_training_shorter_than_the_interval_leaves_a_trace(tmp_path: Path) -> None:
    callback = LigerCallback(verbose=False)
    run = fit(Plain(causal_lm()), loader(), callback, logger=CSVLogger(tmp_path), log_every_n_steps=50)
    assert len(_rows(tmp_path, "liger/tokens_per_second")) == 1
    assert run.report["metrics"].keys() == NAMES | LATER


@pytest.mark.parametrize(
    "options",
    [
        {"logger": False, "log_every_n_steps": 1},
        {"logger": False, "log_every_n_steps": 0},
        {"enable_progress_bar": True, "log_every_n_steps": 1},
        {"fast_dev_run": True},
        {"fast_dev_run": 2},
        {"overfit_batches": 2},
        {"limit_train_batches": 3, "max_epochs": 2},
        {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
        {"inference_mode": False},
        {"detect_anomaly": True},
        {"deterministic": True},
        {"profiler": "simple"},
    ],
    ids=str,
)
def test_trainer_options_do_not_matter(options: dict[str, Any], tmp_path: Path) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        plain, ours = both(lambda: Plain(causal_lm()), loader, default_root_dir=tmp_path, **options)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert_same(plain, ours)
    assert_engaged(ours)
    assert ours.report["metrics"].keys() - LATER == NAMES


def test_barebones() -> None:
    losses = []
    for callback in (None, LigerCallback()):
        module = Plain(causal_lm())
        callbacks: Any = [] if callback is None else [callback]
        trainer = L.Trainer(accelerator="cpu", barebones=True, max_steps=4, callbacks=callbacks)
        trainer.fit(module, loader())
        losses.append([p.detach().norm().item() for p in module.parameters()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert callback is not None and callback.report.metrics.keys() == NAMES | LATER


class Several(Plain):
    """Batches from several loaders at once: a dict of batches, each run through the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(self.model(**part).loss for part in batch.values() if part is not None)


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_several_loaders(mode: Any) -> None:
    def data() -> Any:
        return CombinedLoader({"a": loader(), "b": loader(count=8, batch_size=2, seed=5)}, mode)

    plain, ours = both(lambda: Several(causal_lm()), data)
    assert_same(plain, ours)
    assert_engaged(ours)
    assert ours.report["padding_free"]["calls"] == 8


class Rich(Plain):
    """Non-tensor entries, keys that the step pops, labels edited in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch.pop("names")[0].startswith("doc")
        labels = batch["input_ids"].clone()
        labels[labels == 0] = -100
        return self.model(**batch, labels=labels).loss


def test_batches_with_other_things_in_them() -> None:
    def function(batch: Any) -> Any:
        made: dict[str, Any] = collate(batch)
        del made["labels"]
        return {**made, "names": [f"doc {i}" for i in range(len(batch))]}

    plain, ours = both(lambda: Rich(causal_lm()), lambda: loader(function))
    assert_same(plain, ours)
    assert_engaged(ours)


def test_tokens_are_counted_where_padding_stays() -> None:
    class Pads(Plain):
        """Scores padded positions, so that removing them would change the training."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            labels = batch["input_ids"]
            return self.model(**{**batch, "labels": labels}).loss

    plain, ours = both(lambda: Pads(causal_lm()), loader)
    assert_same(plain, ours)
    padding = ours.report["padding_free"]
    assert padding["packed_calls"] == padding["extra_padded_runs"] == 1
    assert any("reads padded positions" in reason for reason in padding["off"])
    assert padding["tokens"] == real_tokens(loader())


def test_windows() -> None:
    report = Report()
    padding = report.padding
    clock = [0.0]
    original, meter.time = meter.time, SimpleNamespace(perf_counter=lambda: clock[0])  # type: ignore[assignment]
    try:
        one = meter.Meter(report)
        strategy: Any = SimpleNamespace(world_size=1)
        device = torch.device("cpu")
        padding.seen((2, 5))
        padding.real(6, (4, 2))
        clock[0] = 3.0
        assert one.read(device, strategy)["liger/tokens_per_second"] == 2.0
        assert "liger/tokens_per_second" not in one.read(device, strategy), "an empty window has no rate"
        one.begin_validation(None, None)
        padding.seen((9, 9))
        clock[0] = 50.0
        one.begin_validation(None, None)
        one.end_validation(None, None)
        one.end_validation(None, None)
        padding.seen((1, 4))
        clock[0] = 54.0
        found = one.overall(device, strategy)
        assert found["liger/tokens_per_second"] == pytest.approx((6 + 4) / (3 + 4))
        assert found["liger/padding_fraction"] == pytest.approx(1 - 10 / 14)
    finally:
        meter.time = original
