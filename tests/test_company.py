"""Other features of Lightning, transformers and PEFT in the same training."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from helpers import (
    QUIET,
    Plain,
    assert_engaged,
    assert_same,
    both,
    causal_lm,
    collate,
    config,
    fit,
    loader,
    relative_all,
)
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelSummary,
    StochasticWeightAveraging,
)
from torch import nn

from lightning_liger import LigerCallback


class Tunable(Plain):
    def __init__(self) -> None:
        super().__init__(causal_lm(), lr=0.05)
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return loader(batch_size=self.batch_size)


@pytest.mark.parametrize(
    "callback",
    [
        lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
        lambda: EMAWeightAveraging(decay=0.5),
        lambda: LearningRateFinder(num_training_steps=6, update_attr=True),
        lambda: BatchSizeFinder(max_trials=2, steps_per_trial=1),
        lambda: ModelSummary(max_depth=-1),
    ],
    ids=["swa", "ema", "lr finder", "batch size finder", "summary"],
)
def test_callbacks_of_lightning(callback: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, "default_root_dir": tmp_path}
    options["enable_checkpointing"] = True
    plain, ours = (
        fit(Tunable(), None, mine, callbacks=[callback()], **options) for mine in (None, LigerCallback(verbose=False))
    )
    assert_same(plain, ours, parameter=2e-5)
    assert_engaged(ours)
    bound = [m for m in ours.trainer.lightning_module.modules() if "forward" in vars(m)]
    assert not bound


def test_eval_mode_is_no_obstacle() -> None:
    """``from_pretrained`` answers in eval mode, and Lightning leaves it so."""
    plain, ours = both(lambda: Plain(causal_lm().eval()), loader)
    assert_same(plain, ours)
    assert_engaged(ours)


class Classifies(Plain):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(transformers.AutoModelForSequenceClassification.from_config(config(num_labels=3)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        classes = batch.pop("labels").clamp_min(0).sum(1) % 3
        return self.model(**batch, labels=classes).loss


class Rewards(Plain):
    """A value head of one's own on the last real token of each row."""

    def __init__(self) -> None:
        super().__init__(causal_lm())
        torch.manual_seed(5)
        self.value = nn.Linear(32, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mask = batch["attention_mask"]
        hidden = self.model(batch["input_ids"], attention_mask=mask, output_hidden_states=True).hidden_states[-1]
        last = hidden[torch.arange(len(mask)), mask.sum(1) - 1]
        return self.value(last).sigmoid().log().neg().mean()


@pytest.mark.parametrize("module", [Classifies, Rewards])
def test_heads_that_are_not_language_models(module: Any) -> None:
    plain, ours = both(module, loader)
    assert_same(plain, ours)
    assert_engaged(ours, fused=False)


@pytest.mark.parametrize(
    ("target", "saved"),
    [
        (["q_proj", "v_proj"], None),
        (["q_proj", "lm_head"], None),
        (["q_proj", "embed_tokens"], None),
        (["q_proj"], ["embed_tokens", "lm_head"]),
    ],
    ids=["attention", "head", "embedding", "saved"],
)
def test_lora(target: list[str], saved: list[str] | None) -> None:
    import peft

    def make() -> Any:
        torch.manual_seed(6)
        adapter = peft.LoraConfig(r=4, target_modules=target, lora_dropout=0.0, init_lora_weights=False)
        adapter.modules_to_save = saved
        return Plain(peft.get_peft_model(causal_lm("llama"), adapter).train())

    plain, ours = both(make, loader)
    assert_same(plain, ours)
    assert_engaged(ours)
    assert all("lora" in name or "modules_to_save" in name for name in ours.gradients[0])


class Preference(Plain):
    """DPO: a reference model inside the module, without gradients; log-probabilities gathered by hand."""

    def __init__(self) -> None:
        super().__init__(causal_lm())
        self.reference = causal_lm(seed=3).requires_grad_(False)

    def _score(self, model: Any, batch: Any) -> torch.Tensor:
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        found = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        return (found * (labels != -100)).sum(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            before = self._score(self.reference, batch)
        gain = self._score(self.model, batch) - before
        return -torch.nn.functional.logsigmoid(gain[::2] - gain[1::2]).mean()


def test_preferences_with_a_reference_model() -> None:
    # in fp64: the loss is about differences of sums of hundreds, whose fp32 rounding is ten times any tolerance here
    plain, ours = (
        fit(Preference(), loader(), callback, precision="64-true")
        for callback in (None, LigerCallback(verbose=False, bf16=False))
    )
    assert_same(plain, ours, loss=1e-9, gradient=1e-9, parameter=1e-9)
    assert_engaged(ours)
    assert ours.report["padding_free"]["applied"] == 2
    assert ours.report["padding_free"]["packed_calls"] > 0


def _compiled_model() -> Any:
    return Plain(torch.compile(causal_lm(), backend="eager"))  # type: ignore[arg-type]


def _compiled_module() -> Any:
    return torch.compile(Plain(causal_lm()), backend="eager")


def _compiled_layers() -> Any:
    model = causal_lm()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return Plain(model)


# A plain and an accelerated compilation each: about 10 s.
@pytest.mark.parametrize("make", [_compiled_model, _compiled_module, _compiled_layers])
def test_compiled_models_train_the_same(make: Any) -> None:
    runs = []
    for callback in (None, LigerCallback(verbose=False)):
        torch._dynamo.reset()
        runs.append(fit(make(), loader(count=8, seed=2), callback, max_steps=2))
    assert_same(*runs)
    layers_only = make is _compiled_layers
    assert_engaged(runs[1], packed=layers_only, fused=layers_only)
    told = [any("torch.compile" in r for r in runs[1].report[f]["off"]) for f in ("padding_free", "fused_head")]
    assert told == [not layers_only] * 2


def test_skipped_batches_and_early_stops() -> None:
    class Skips(Plain):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    plain, ours = both(lambda: Skips(causal_lm()), loader, max_steps=-1, max_epochs=2)
    assert len(ours.losses) == 4
    assert_same(plain, ours)
    assert_engaged(ours)


class Copies(Plain):
    """Takes copies of itself and of the callback while training."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.twin = [copy.deepcopy(self.model)]
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LigerCallback):
                assert pickle.loads(pickle.dumps(callback)).settings == callback.settings
        return super().training_step(batch, batch_idx)


def test_copies_made_while_training() -> None:
    made: list[Copies] = []

    def make() -> Copies:
        made.append(Copies(causal_lm()))
        return made[-1]

    plain, ours = both(make, loader)
    assert_same(plain, ours)
    twins = [m.twin[0] for m in made]
    assert relative_all(*[dict(t.named_parameters()) for t in twins]) < 1e-5
    batch = collate(loader().dataset[:4])
    assert twins[1](**batch).loss.item() == pytest.approx(twins[0](**batch).loss.item(), rel=1e-5)


def test_two_of_our_callbacks_are_one_too_many() -> None:
    plain = fit(Plain(causal_lm()), loader())
    first, second = LigerCallback(verbose=False), LigerCallback(verbose=False)
    module = Plain(causal_lm())
    ours = fit(module, loader(), first, callbacks=[second])
    assert_same(plain, ours)
    assert first.report is second.report and first.report.padding.calls == 4
    assert not [m for m in module.modules() if "forward" in vars(m)]


def test_lightning_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI

    file = tmp_path / "config.yaml"
    file.write_text(
        """
trainer:
  accelerator: cpu
  max_steps: 2
  logger: false
  enable_progress_bar: false
  enable_checkpointing: false
  callbacks:
    - class_path: lightning_liger.LigerCallback
      init_args: {verbose: false, attention: sdpa}
"""
    )
    monkeypatch.setattr(sys, "argv", ["train", "fit", "--config", str(file)])
    cli = LightningCLI(Tunable, save_config_callback=None)
    callback = next(c for c in cli.trainer.callbacks if isinstance(c, LigerCallback))  # type: ignore[attr-defined]
    assert callback.settings.attention == "sdpa" and callback.report.padding.packed_calls == 2


def test_the_callback_can_come_from_the_module() -> None:
    callback = LigerCallback(verbose=False)

    class Brings(Plain):
        def configure_callbacks(self) -> Any:
            return [callback]

    L.Trainer(**QUIET).fit(Brings(causal_lm()), loader())
    assert callback.report.padding.packed_calls == 4
