"""Trainers that copy or send the module: processes that are spawned, averaged weights, litgpt in a LightningModule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# a spawned process imports this file alone; the interpreter comes before anything that imports Triton
import liger_interpreter  # noqa: F401
import lightning as L
import pytest
import torch
from helpers import QUIET, VOCAB, Plain, fit, relative_all
from lightning.pytorch.callbacks import WeightAveraging
from models import only_kernels, tiny
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback


def batches() -> DataLoader[Any]:
    """Rows of one length, so that a mean over two processes is a mean over two batches."""
    ids = torch.randint(3, VOCAB, (4, 5), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    return DataLoader(rows, batch_size=1)  # type: ignore[arg-type]


class Reporting(Plain):
    """Writes down what happened in its own process."""

    def __init__(self, model: Any, folder: str) -> None:
        super().__init__(model, lr=0.05)
        self.folder = folder

    def on_train_end(self) -> None:
        ours = [c for c in self.trainer.callbacks if isinstance(c, LigerCallback)]
        bound = sum("forward" in vars(m) for m in self.model.modules())
        found = {"ops": ours[0].report.to_dict()["kernels"]["ops"] if ours else {}, "bound": bound}
        Path(self.folder, f"{self.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.timeout(300)
def test_spawned_processes(tmp_path: Path) -> None:
    """The module is pickled on its way, with kernels of an earlier ``accelerate`` call still bound."""
    plain = fit(Plain(tiny("llama"), lr=0.05), batches(), accumulate_grad_batches=2, max_steps=2)
    module = Reporting(tiny("llama"), str(tmp_path))
    handle = only_kernels(module)
    callback = LigerCallback(kernels=True, padding_free=False, fused_head=False, verbose=False)
    options = {**QUIET, "strategy": "ddp_spawn", "devices": 2, "max_steps": 2, "callbacks": [callback]}
    L.Trainer(**options).fit(module, batches())
    handle.revert()
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["bound"] == 9 + 1, "nine kernels, and generate's bypass"
        assert {k: (o["applied"], o["called"]) for k, o in found["ops"].items()} == {
            "rms_norm": (5, 5),
            "swiglu": (2, 2),
            "rope": (2, 2),
        }
    assert not any("forward" in vars(m) for m in module.modules())
    trained = {n: p.detach() for n, p in module.named_parameters()}
    assert relative_all(trained, plain.parameters) < 1e-5


def test_averaged_weights() -> None:
    """The average is a deep copy of the module, made before kernels are bound; validation swaps weights with it."""

    class Module(Plain):
        def __init__(self) -> None:
            super().__init__(tiny("qwen3"), lr=0.05)
            self.scores: list[float] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.scores.append(float(self.model(**batch).loss))

    def run(callback: LigerCallback | None) -> tuple[Any, list[float]]:
        module = Module()
        options: dict[str, Any] = {"callbacks": [WeightAveraging()], "max_steps": 3, "val": batches()}
        found = fit(module, batches(), callback, limit_val_batches=1, val_check_interval=1, **options)
        return found, module.scores

    plain, scores = run(None)
    ours, our_scores = run(LigerCallback(kernels=True, padding_free=False, fused_head=False, verbose=False))
    assert relative_all(ours.parameters, plain.parameters) < 1e-5
    assert our_scores == pytest.approx(scores, rel=1e-5) and len(scores) == 3
    assert all(op["called"] == op["applied"] > 0 for op in ours.report["kernels"]["ops"].values())
    assert torch.isfinite(torch.tensor(scores)).all()
