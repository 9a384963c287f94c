"""Evaluation, generation, prediction, checkpoints and errors around an accelerated training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import pytorch_lightning as PL
import torch
import torch.nn.functional as F
from helpers import (
    QUIET,
    Plain,
    Run,
    assert_engaged,
    assert_same,
    both,
    causal_lm,
    collate_left,
    fit,
    loader,
    relative_all,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_liger import LigerCallback
from lightning_liger.padding.attention import PACKED


class Validating(Plain):
    """Validates with a loss, with accuracy from the logits and with generated text."""

    def __init__(self, kind: str = "qwen2") -> None:
        super().__init__(causal_lm(kind))
        self.generated: list[Tensor] = []
        self.val_losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.model(**batch)
        right = (out.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]) & (batch["labels"][:, 1:] != -100)
        self.val_losses.append(float(out.loss))
        self.log("val_loss", out.loss, batch_size=1)
        self.log("val_right", right.sum().float(), reduce_fx="sum", batch_size=1)
        prompt = {k: v[:, -3:] for k, v in batch.items() if k != "labels"}
        self.generated.append(self.model.generate(**prompt, max_new_tokens=4, do_sample=False))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.model(**batch).loss, batch_size=1)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert "forward" not in vars(self.model.model), "prediction is not accelerated"
        labels = batch.pop("labels")
        logits = self.model(**batch).logits
        assert type(logits) is Tensor
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")


def left_loader() -> Any:
    return loader(collate_left)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_validation_with_loss_and_generation(kind: str) -> None:
    modules: list[Validating] = []

    def make() -> Validating:
        modules.append(Validating(kind))
        return modules[-1]

    plain, ours = both(make, left_loader, val=left_loader, val_check_interval=2, num_sanity_val_steps=1)
    assert_same(plain, ours)
    assert_engaged(ours)
    assert len(modules[0].val_losses) == len(modules[1].val_losses) == 9
    assert modules[1].val_losses == pytest.approx(modules[0].val_losses, rel=1e-5)
    assert ours.metrics["val_right"] == plain.metrics["val_right"]
    for a, b in zip(modules[0].generated, modules[1].generated, strict=True):
        assert torch.equal(a, b)


def _trainer(callback: LigerCallback | None, **options: Any) -> L.Trainer:
    return L.Trainer(callbacks=[] if callback is None else [callback], **{**QUIET, **options})


def test_all_loops_one_after_the_other() -> None:
    found: list[list[float]] = []
    for callback in (None, LigerCallback(verbose=False)):
        module, numbers = Validating(), []
        trainer = _trainer(callback, max_steps=-1, max_epochs=1)
        numbers.append(trainer.validate(module, left_loader(), verbose=False)[0]["val_loss"])
        if callback is not None:
            assert callback.report.head.fused_calls == 4 and callback.report.padding.packed_calls > 0
        trainer.fit(module, left_loader(), left_loader())
        numbers.append(trainer.validate(module, left_loader(), verbose=False)[0]["val_loss"])
        numbers.append(trainer.test(module, left_loader(), verbose=False)[0]["test_loss"])
        predicted = trainer.predict(module, left_loader())
        assert predicted is not None
        numbers += [float(torch.as_tensor(p).sum()) for p in predicted]
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, left_loader(), left_loader())  # fit twice
        assert trainer.global_step == 8
        numbers.append(trainer.validate(module, left_loader(), verbose=False)[0]["val_loss"])
        found.append(numbers)
    assert len(set(found[0])) > 6, "the numbers must tell steps apart"
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_fit_twice_with_one_callback_and_new_trainers() -> None:
    callback = LigerCallback(verbose=False)
    modules = Plain(causal_lm()), Plain(causal_lm())
    for _ in range(2):
        plain, ours = fit(modules[0], loader()), fit(modules[1], loader(), callback)
        assert_same(plain, ours)
        assert_engaged(ours)
        assert ours.report["padding_free"]["calls"] == 4, "each fit has a report of its own"


def test_prediction_accepts_any_precision() -> None:
    trainer = _trainer(LigerCallback(verbose=False), precision="64-true")
    predicted = trainer.predict(Validating(), left_loader())
    assert predicted is not None and torch.as_tensor(predicted[0]).dtype == torch.float64


# -- checkpoints -----------------------------------------------------------------------------------------------------


def _interrupted(first: Any, second: Any, folder: Path) -> tuple[Run, Run]:
    """Two steps with ``first``, then the rest from the checkpoint with ``second``."""
    saver = ModelCheckpoint(folder, filename="half", every_n_train_steps=2, save_top_k=-1)
    data = loader(count=8)  # two steps an epoch: Lightning resumes a plain DataLoader at the beginning of an epoch
    a = fit(Plain(causal_lm()), data, first, callbacks=[saver], enable_checkpointing=True, max_steps=2)
    b = fit(Plain(causal_lm(seed=9)), data, second, ckpt_path=str(folder / "half.ckpt"))
    return a, b


@pytest.mark.parametrize("accelerated", [(True, False), (False, True), (True, True)], ids=["off", "on", "both"])
def test_checkpoint_and_resume(accelerated: tuple[bool, bool], tmp_path: Path) -> None:
    whole = fit(Plain(causal_lm()), loader(count=8))
    first, second = (LigerCallback(verbose=False) if on else None for on in accelerated)
    a, b = _interrupted(first, second, tmp_path)
    assert a.losses + b.losses == pytest.approx(whole.losses, rel=1e-5)
    assert relative_all(b.parameters, whole.parameters) < 1e-5
    for run, on in zip((a, b), accelerated, strict=True):
        if on:
            assert_engaged(run)
            assert run.report["padding_free"]["calls"] == 2


def test_checkpoints_hold_nothing_of_ours(tmp_path: Path) -> None:
    for name, callback in (("plain", None), ("ours", LigerCallback(verbose=False))):
        saver = ModelCheckpoint(tmp_path, filename=name, monitor="val_loss", save_weights_only=False)
        fit(Validating(), loader(), callback, val=loader(), callbacks=[saver], enable_checkpointing=True)
    states = [torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in ("plain", "ours")]
    assert states[0].keys() == states[1].keys()
    assert states[0]["state_dict"].keys() == states[1]["state_dict"].keys()
    assert states[0]["callbacks"].keys() == states[1]["callbacks"].keys()
    assert relative_all(states[1]["state_dict"], states[0]["state_dict"]) < 1e-5
    loaded = Validating.load_from_checkpoint(tmp_path / "ours.ckpt", weights_only=False)
    assert relative_all(loaded.state_dict(), states[0]["state_dict"]) < 1e-5


# -- errors ----------------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def failing(tree: Any, where: str) -> Any:
    """A LightningModule of ``tree`` that fails in one of its methods."""

    class Failing(tree.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = causal_lm()
            self.where = where

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(**batch).loss
            if self.where == "training_step" and batch_idx == 1:
                raise Boom
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.model(**batch)
            if self.where == "validation_step":
                raise Boom

        def configure_optimizers(self) -> Any:
            if self.where == "configure_optimizers":
                raise Boom
            return torch.optim.SGD(self.parameters(), 0.1)

    return Failing()


@pytest.mark.parametrize("where", ["training_step", "validation_step", "configure_optimizers"])
@pytest.mark.parametrize("tree", [L, PL], ids=["lightning", "pytorch_lightning"])
def test_an_exception_takes_everything_back(where: str, tree: Any) -> None:
    from transformers.modeling_utils import AttentionInterface

    module = failing(tree, where)
    with pytest.raises(Boom):  # what Lightning itself leaves on a module is there before we come
        tree.Trainer(**{**QUIET, "num_sanity_val_steps": 1}).fit(module, left_loader(), left_loader())
    callback = LigerCallback(verbose=False)
    trainer = tree.Trainer(callbacks=[callback], **{**QUIET, "num_sanity_val_steps": 1})
    before = [set(vars(m)) for m in module.modules()]
    strategy = set(vars(trainer.strategy))
    with pytest.raises(Boom):
        trainer.fit(module, left_loader(), left_loader())
    assert callback.report.padding.applied == 1
    assert [set(vars(m)) for m in module.modules()] == before
    assert set(vars(trainer.strategy)) == strategy
    assert PACKED not in AttentionInterface._global_mapping
    # the same module trains again, as if nothing had been
    module.where = "nowhere"
    assert_engaged(fit(module, left_loader(), LigerCallback(verbose=False), tree=tree))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, torch.OutOfMemoryError])
def test_interruptions_take_everything_back(error: type[BaseException]) -> None:
    class Interrupted(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise error
            return loss

    module = Interrupted(causal_lm())
    trainer = _trainer(LigerCallback(verbose=False))
    with pytest.raises((error, SystemExit)):
        trainer.fit(module, loader())
    assert not [m for m in module.modules() if "forward" in vars(m)]
    assert not {"setup", "batch_to_device"} & vars(trainer.strategy).keys()


def test_the_random_stream_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout and shuffling after us are what they would have been."""
    from lightning_liger import accelerate
    from lightning_liger.padding import probe

    monkeypatch.setattr(probe, "_VERDICTS", {})  # ask again
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)  # fork_rng restores no device it was not told of
    torch.manual_seed(11)
    model = causal_lm("gemma2")
    seeded.clear()
    before = torch.get_rng_state()
    handle = accelerate(model)
    assert handle.report.padding.applied == 1
    assert torch.equal(torch.get_rng_state(), before) and not seeded
    handle.revert()
