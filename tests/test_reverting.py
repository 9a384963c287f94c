"""Nothing of ours is left behind: on modules, classes, libraries, strategies; nor in copies."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import transformers.models.gemma2.modeling_gemma2 as gemma2_code
import transformers.models.qwen2.modeling_qwen2 as qwen2_code
from helpers import QUIET, Plain, causal_lm, collate, collate_left, documents, fit, loader
from lightning import Trainer
from torch import nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from lightning_liger import LigerCallback, Settings, accelerate
from lightning_liger.head.lazy import LazyRows


def snapshot(module: Any, strategy: Any = None) -> dict[str, Any]:
    """Everything that acceleration could have touched, by identity."""
    seen: dict[str, Any] = {}
    classes = {k for m in module.modules() for k in type(m).__mro__}
    for path, child in module.named_modules():
        seen[f"module {path}"] = {k: id(v) for k, v in vars(child).items() if k not in ("_trainer", "training")}
        if hasattr(child, "config"):
            seen[f"config {path}"] = {k: repr(v) for k, v in vars(child.config).items()}
    for owner in (*classes, qwen2_code, gemma2_code, F, torch, nn, torch.Tensor, transformers.modeling_utils):
        seen[str(owner)] = {k: id(v) for k, v in vars(owner).items() if not k.startswith("_abc_")}
    seen["attention"] = dict(AttentionInterface._global_mapping)
    seen["masks"] = dict(AttentionMaskInterface._global_mapping)
    if strategy is not None:
        seen["strategy"] = set(vars(strategy))
    return seen


def assert_nothing_left(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    changed = {
        name: [k for k in {*before[name], *after[name]} if k not in before[name] or k not in after[name]]
        or [k for k in before[name] if before[name][k] != after[name][k]]
        for name in before
        if before[name] != after[name]
    }
    assert not changed


class Stop(Exception):
    pass


class Stopping(Plain):
    stop = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.stop and batch_idx == 2:
            raise Stop
        return loss


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
@pytest.mark.parametrize("stop", [False, True], ids=["to the end", "exception"])
def test_fit_leaves_nothing(kind: str, stop: bool) -> None:
    module = Stopping(causal_lm(kind))
    fit(module, loader(), max_steps=1)  # what Lightning and lazy imports leave is there before
    fit(Plain(causal_lm(kind)), loader(), LigerCallback(verbose=False), max_steps=1)
    callback = LigerCallback(verbose=False)
    trainer = Trainer(callbacks=[callback], **QUIET)
    before = snapshot(module, trainer.strategy)
    module.stop = stop
    if stop:
        with pytest.raises(Stop):
            trainer.fit(module, loader())
        del module.stop
    else:
        trainer.fit(module, loader())
        del module.stop
    assert callback.report.padding.packed_calls > 0
    after = snapshot(module, trainer.strategy)
    # set by Trainer.fit, with or without us
    assert_nothing_left(
        {k: v for k, v in before.items() if k not in ("module ", "strategy")},
        {k: v for k, v in after.items() if k not in ("module ", "strategy")},
    )
    assert {k for k in after["module "] if "lightning_liger" in type(vars(module)[k]).__module__} == set()
    assert not {"setup", "batch_to_device"} & after["strategy"]


def test_accelerate_and_revert_leave_nothing() -> None:
    model = causal_lm("gemma2")
    batch = collate(documents(4))
    model(**batch).loss.backward()
    handle = accelerate(model)  # the probe and its imports
    handle.revert()
    before = snapshot(model)
    handle = accelerate(model)
    assert handle.is_active and "forward" in vars(model.lm_head)
    model(**batch).loss.backward()
    assert handle.report.padding.packed_calls == 1
    handle.revert()
    handle.revert()
    assert not handle.is_active
    assert_nothing_left(before, snapshot(model))


def test_accelerate_is_idempotent() -> None:
    model = causal_lm()
    first = accelerate(model)
    bound = [dict(vars(m)) for m in model.modules()]
    assert accelerate(model) is first
    assert [dict(vars(m)) for m in model.modules()] == bound
    other = accelerate(model, Settings(padding_free=False))
    assert other is not first and not first.is_active
    assert other.report.padding.applied == 0 and other.report.head.applied == 1
    other.revert()
    assert "forward" not in vars(model.model) and "forward" not in vars(model.lm_head)


def test_an_accelerated_model_can_be_forgotten() -> None:
    model = causal_lm("llama")
    accelerate(model)
    model(**collate(documents(4))).loss.backward()
    forgotten = weakref.ref(model)
    del model
    gc.collect()
    assert forgotten() is None


def test_state_dict_keys_and_pause() -> None:
    model = causal_lm("llama")
    keys = list(model.state_dict())
    batch = collate(documents(4))
    handle = accelerate(model)
    assert list(model.state_dict()) == keys
    with handle.paused():
        assert type(model(**batch).logits) is torch.Tensor
        assert handle.report.padding.calls == 0
    assert type(model(**batch).logits) is LazyRows
    assert handle.report.padding.packed_calls == 1


def _saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: list[Callable[[Any], Any]] = [
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
    _saved_and_loaded,
]


@pytest.mark.parametrize("duplicate", COPIES, ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_copies_of_an_accelerated_model(duplicate: Callable[[Any], Any], kind: str) -> None:
    model, batch = causal_lm(kind), collate_left(documents(4))
    plain = model(**batch)
    handle = accelerate(model)
    assert type(model(**batch).logits) is LazyRows
    duplicated = duplicate(model)
    assert duplicated(**batch).loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    seen = handle.report.padding.calls
    handle.revert()
    out = duplicated(**batch)
    assert type(out.logits) is torch.Tensor, "a copy behaves plainly once the original does"
    assert torch.equal(out.logits, plain.logits)
    assert torch.equal(duplicate(model)(**batch).logits, plain.logits)
    assert handle.report.padding.calls == seen, "a copy does not count in the original's report"
    # a copy is a model like any other
    again = accelerate(duplicated)
    assert type(duplicated(**batch).logits) is LazyRows and again.report.padding.packed_calls == 1
    again.revert()
    assert type(duplicated(**batch).logits) is torch.Tensor


def test_a_pickle_needs_nothing_of_ours() -> None:
    model = causal_lm()
    handle = accelerate(model)
    data = pickle.dumps(model)
    assert b"lightning_liger" not in data
    handle.revert()


def test_a_foreign_patch_stays() -> None:
    model, batch, calls = causal_lm(), collate(documents(4)), []
    original = model.lm_head.forward

    def foreign(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return original(hidden) * 2

    model.lm_head.forward = foreign
    handle = accelerate(model)
    loaded = copy.deepcopy(model)
    model(**batch)
    handle.revert()
    assert vars(model.lm_head)["forward"] is foreign
    model(**batch)
    assert calls
    assert loaded(**batch).loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)


def test_a_patch_on_top_of_ours_stays() -> None:
    model, batch = causal_lm(), collate(documents(4))
    plain = model(**batch).loss.item()
    handle = accelerate(model)
    ours = model.model.forward
    model.model.forward = functools.partial(ours)
    on_top = model.model.forward
    assert model(**batch).loss.item() == pytest.approx(plain, rel=1e-6)
    assert handle.report.padding.packed_calls == 1
    handle.revert()
    assert vars(model.model)["forward"] is on_top
    out = model(**batch)
    assert type(out.logits) is torch.Tensor and out.loss.item() == plain
    assert handle.report.padding.packed_calls == 1


class Distilling(Plain):
    """A student to train and a frozen teacher that shares its configuration object."""

    def __init__(self, teacher: Any) -> None:
        super().__init__(transformers.Qwen2ForCausalLM(teacher.config).train())
        self.teacher = [teacher]  # not a submodule: nobody asked to accelerate it
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            out = self.teacher[0](**batch)
        self.seen.append((type(out.logits), self.teacher[0].config._attn_implementation, out.loss.item()))
        return loss


def test_two_models_with_one_config_object() -> None:
    teacher = causal_lm()
    expected = [teacher(**batch).loss.item() for batch in loader()]
    before = snapshot(teacher)
    module = Distilling(teacher)
    callback = LigerCallback(verbose=False)
    fit(module, loader(), callback)
    assert callback.report.padding.calls == callback.report.padding.packed_calls == 4
    assert {kind for kind, _, _ in module.seen} == {torch.Tensor}
    assert {attention for _, attention, _ in module.seen} == {"sdpa"}
    assert [loss for _, _, loss in module.seen] == expected
    assert_nothing_left(before, snapshot(teacher))
