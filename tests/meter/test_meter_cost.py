"""What the meter makes the host do, and that what it measured arrives in one piece."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import Plain, causal_lm, fit, loader
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_liger import LigerCallback
from lightning_liger.meter.meter import Meter

HOOKS = ("begin_batch", "before_backward", "after_backward", "before_optimizer_step", "end_batch")
EVERY = 10


class Calls(L.Callback):
    """Counts calls of Python functions inside of the meter's hooks, step by step."""

    def __init__(self, ours: LigerCallback) -> None:
        self.ours = ours
        self.steps: list[int] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        (meter,) = (h for h in self.ours._hooks if isinstance(h, Meter))
        for name in HOOKS:
            setattr(meter, name, self._counted(getattr(meter, name)))

    def _counted(self, hook: Any) -> Any:
        def count(frame: Any, event: str, argument: Any) -> None:
            self.steps[-1] += event == "call"

        def counted(*args: Any) -> None:
            sys.setprofile(count)
            try:
                hook(*args)
            finally:
                sys.setprofile(None)

        return counted

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.steps.append(0)


@pytest.mark.parametrize("layers", [1, 8])
def test_a_step_costs_few_calls_and_a_reading_no_more_than_a_few_hundred(layers: int) -> None:
    """Counted and not clocked, so that a busy machine changes nothing; the number of layers may not matter either."""
    ours = LigerCallback(verbose=False, verify="off")
    calls = Calls(ours)
    data = loader(count=4 * 3 * EVERY)
    steps: dict[str, Any] = {"max_steps": 3 * EVERY, "limit_train_batches": 3 * EVERY, "log_every_n_steps": EVERY}
    fit(Plain(causal_lm("llama", num_hidden_layers=layers)), data, ours, callbacks=[calls], **steps)
    assert ours.report.metrics["liger/tokens_per_second"] > 0
    settled = list(enumerate(calls.steps, 1))[EVERY:]  # before that, the model is read and a step watched
    readings = [n for step, n in settled if step % EVERY == 0]
    between = [n for step, n in settled if step % EVERY]
    assert len(readings) == 2
    assert max(between) < 50, between
    assert max(readings) < 600, readings


class Written(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        self.calls.append((step, dict(metrics)))


class Logs(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss)
        return loss


class Numbers(Logs):
    """Names the x of its curves itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", 100.0 + batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("kind", "steps"), [(Logs, [1, 3]), (Numbers, [101, 103])])
def test_one_call_with_the_users_own_metrics(kind: Any, steps: list[int]) -> None:
    loggers = [Written(), Written()]
    run = fit(kind(causal_lm()), loader(), LigerCallback(verbose=False), logger=loggers, log_every_n_steps=2)
    for logger in loggers:
        assert [step for step, metrics in logger.calls if "mine" in metrics] == steps
        assert all("liger/tokens_per_second" in metrics and "mine" in metrics for _, metrics in logger.calls)
    trainer = run.trainer
    for metrics in (trainer.callback_metrics, trainer.logged_metrics):
        assert isinstance(metrics["liger/tokens_per_second"], torch.Tensor)
        last = loggers[0].calls[-1][1]["liger/tokens_per_second"]
        assert metrics["liger/tokens_per_second"].item() == pytest.approx(last)
    assert "log_metrics" not in vars(trainer._logger_connector), "the Trainer is as it was"


def test_a_checkpoint_can_follow_a_metric_of_ours(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="liger/loss_std", every_n_train_steps=2, mode="min")
    options: dict[str, Any] = {"log_every_n_steps": 2, "enable_checkpointing": True, "callbacks": [best]}
    fit(Logs(causal_lm()), loader(), LigerCallback(verbose=False), **options)
    assert best.best_model_score is not None and Path(best.best_model_path).is_file()
