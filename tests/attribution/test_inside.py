"""`benchmark_steps`: measured inside of a training, which goes on as if nothing had been."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_liger import LigerCallback
from lightning_liger.settings import Settings


class Careful(jobs.Ordinary):
    """Draws random numbers, counts its steps, writes into its batch and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.losses: list[Tensor] = []
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        self.seen += batch["input_ids"].sum()
        batch["labels"][batch["labels"] == 7] = -100
        batch["labels"] += 0 * torch.randint(2, batch["labels"].shape)
        loss = super().training_step(batch, batch_idx) * (1 + torch.rand(()))
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss


def fit(module: L.LightningModule, **options: Any) -> LigerCallback:
    L.seed_everything(5, verbose=False)
    callback = LigerCallback(verify="off", **options)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, jobs.loader())
    return callback


def trained(**options: Any) -> tuple[Careful, LigerCallback]:
    torch.manual_seed(0)
    module = Careful()
    return module, fit(module, verbose=False, **options)


def test_the_training_is_the_same_bit_by_bit() -> None:
    one, without = trained()
    two, callback = trained(benchmark_steps=2)
    assert one.steps == two.steps == 4
    assert torch.equal(torch.stack(one.losses), torch.stack(two.losses))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    before, after = without.report.to_dict(), callback.report.to_dict()
    for key in ("padding_free", "fused_head"):
        assert before[key] == after[key]
    assert before["attribution"] == {}


def test_each_feature_is_measured() -> None:
    _, callback = trained(benchmark_steps=3)
    found = callback.report.attribution
    assert [v["name"] for v in found["variants"]] == ["plain", "+fused head", "+padding-free"]
    assert found["problems"] == [] and found["order"] == "inside of this training"
    for variant in found["variants"]:
        assert len(variant["seconds"]) == 3 and variant["tokens_per_second"] > 0
        assert variant["losses"] == pytest.approx(found["variants"][0]["losses"], rel=1e-5)
    assert found["variants"][2]["largest_relative_loss_difference"] <= 1e-5


def test_the_table_is_shown_before_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    fit(Careful(), benchmark_steps=1, padding_free=False)
    shown = capsys.readouterr().out
    assert shown.index("benchmark_steps=1: cpu") < shown.index("first training step")
    assert "+fused head" in shown and "+padding-free" not in shown
    assert "No optimizer stepped" in shown


def test_where_nothing_can_be_measured_it_says_so() -> None:
    class Manual(Careful):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    torch.manual_seed(0)
    module = Manual()
    L.seed_everything(5, verbose=False)
    callback = LigerCallback(benchmark_steps=2, verbose=False, verify="off")
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, max_epochs=1, callbacks=[callback], logger=False, barebones=True
    )
    trainer.fit(module, jobs.loader())
    assert any("steps its optimizers by itself" in note for note in callback.report.notes)


def test_on_two_processes() -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(here), str(here.parent), *sys.path])
    done = subprocess.run(
        [*command, str(here / "inside_worker.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.count(": the same") == 2


@pytest.mark.parametrize("value", [-1, True, "5"])
def test_a_wrong_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"benchmark_steps=.*: expected how often to run each variant"):
        Settings(benchmark_steps=value)
