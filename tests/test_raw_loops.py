"""``accelerate(model)`` alone, in loops that are not Lightning's Trainer: Fabric, Accelerate, and Hugging Face's Trainer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import causal_lm, collate, loader
from torch import Tensor

from lightning_liger import accelerate


def own_loss(model: Any, batch: Any) -> Tensor:
    """And a metric of the same logits."""
    x, labels = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1], batch["labels"][:, 1:]
    with torch.no_grad():
        float(((x.argmax(-1) == labels) & (labels != -100)).float().mean())
    return F.cross_entropy(x.flatten(0, 1), labels.flatten())


def by_labels(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def fabric_loop(model: Any, loss: Callable[..., Tensor], precision: str) -> list[float]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)  # type: ignore[arg-type]
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    losses = []
    for step, batch in enumerate(fabric.setup_dataloaders(loader())):
        with fabric.no_backward_sync(wrapped, enabled=step % 2 == 0):
            value = loss(wrapped, batch)
            fabric.backward(value)
        losses.append(float(value))
        if step % 2:
            fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def accelerate_loop(model: Any, loss: Callable[..., Tensor], precision: str) -> list[float]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    kind = "bf16" if "bf16" in precision else "no"
    accelerator = Accelerator(cpu=True, mixed_precision=kind, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            value = loss(model, batch)
            accelerator.backward(value)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(value))
    return losses


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("loss", [by_labels, own_loss])
@pytest.mark.parametrize("loop", [fabric_loop, accelerate_loop])
def test_raw_loops(loop: Any, loss: Any, precision: str) -> None:
    runs, weights = [], []
    for ours in (False, True):
        model = causal_lm()
        handle = accelerate(model) if ours else None
        runs.append(loop(model, loss, precision))
        weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
    assert handle is not None
    tolerance = 1e-5 if precision == "32-true" else 5e-3
    assert runs[1] == pytest.approx(runs[0], rel=tolerance)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=tolerance, atol=tolerance)
    report = handle.report.to_dict()
    assert report["padding_free"]["packed_calls"] == 4 and report["fused_head"]["fused_calls"] == 4, report
    assert report["fused_head"]["materialised_by"] == {}
    handle.revert()
    assert not [m for m in model.modules() if type(vars(m).get("forward")).__module__.startswith("lightning_liger")]


# -- Hugging Face's Trainer ------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.rows = loader().dataset

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def hf_trainer(model: Any, where: Path, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(where),
        use_cpu=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        learning_rate=1e-2,
        optim="sgd",
        **options,
    )
    trainer = transformers.Trainer(model, arguments, collate, Rows(), Rows())
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options", [{}, {"bf16": True}, {"prediction_loss_only": True}], ids=["fp32", "bf16", "loss only"]
)
def test_the_trainer_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    found, metrics, logits = [], [], []
    for ours in (False, True):
        model = causal_lm()
        handle = accelerate(model) if ours else None
        trainer = hf_trainer(model, tmp_path, **options)
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        metrics.append(trainer.evaluate()["eval_loss"])
        logits.append(trainer.predict(Rows()).predictions)
        trainer.save_model(str(tmp_path / f"model-{ours}"))
    assert handle is not None and len(found[0]) == 2
    tolerance = 1e-4 if not options.get("bf16") else 5e-3  # what is logged is rounded
    assert found[1] == pytest.approx(found[0], rel=tolerance)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5 if not options.get("bf16") else 5e-3)
    if logits[0] is not None:
        assert logits[0].shape == logits[1].shape
    report = handle.report.to_dict()
    assert report["padding_free"]["packed_calls"] >= 4 and report["fused_head"]["fused_calls"] >= 4, report
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model-True")
    assert all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in again.named_parameters())


# -- the examples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fabric_loop", "accelerate_loop", "hf_trainer"])
def test_examples_of_loops(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.state import AcceleratorState

    printed = []
    for options in (["--plain"], []):
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr("sys.argv", [name, "--steps", "3", *options])
        monkeypatch.chdir(tmp_path)
        importlib.import_module(name).main()
        printed.append(capsys.readouterr().out)
    losses = [[float(line.split()[-1]) for line in text.splitlines() if line.startswith("step ")] for text in printed]
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], abs=3e-6)  # of what is printed
    assert "removed" in printed[1] and "skipped" in printed[1] and "Padding removal" not in printed[0]
