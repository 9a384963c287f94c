"""Two models of one class in one process, one accelerated: the other never notices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from helpers import Plain, collate, documents, fit
from models import batch, gradients, kernel_bindings, only_kernels, step, tiny
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, accelerate


def snapshot() -> dict[tuple[str, str], int]:
    """The identity of every global of every modelling module, every member of their classes, and of torch.nn.functional."""
    seen: dict[tuple[str, str], int] = {}
    names = [n for n in sys.modules if n.startswith("transformers.models.") and ".modeling_" in n]
    for name in [*names, "torch.nn.functional", "torch.nn", "transformers.activations", "transformers.modeling_utils"]:
        for key, value in list(vars(sys.modules[name]).items()):
            seen[name, key] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                seen.update({(f"{name}.{key}", k): id(v) for k, v in vars(value).items() if not k.startswith("__")})
    return seen


def changed(before: dict[tuple[str, str], int]) -> set[tuple[str, str]]:
    """What is another object now; modules that were imported in between are no change."""
    now = snapshot()
    return {k for k in before if now.get(k) != before[k]}


@pytest.fixture
def unchanged_process() -> Iterator[dict[tuple[str, str], int]]:
    before = snapshot()
    yield before
    assert not changed(before)


@pytest.mark.parametrize("kind", ("llama", "gemma2", "mixtral"))
def test_the_other_model_is_untouched_before_during_and_after(kind: str) -> None:
    student, teacher = tiny(kind), tiny(kind)
    attributes = [dict(vars(m)) for m in teacher.modules()]
    expected = step(teacher)
    before = snapshot()
    handle = only_kernels(student)
    assert not changed(before), "applying changed something outside of the instance"
    student_step = step(student)
    during = step(teacher)
    assert not changed(before)
    assert during[0] == expected[0]
    assert all(torch.equal(during[1][n], g) for n, g in expected[1].items()), "not even by rounding"
    assert all(op.calls for op in handle.report.kernels.ops.values())
    assert student_step[0] == pytest.approx(expected[0], rel=1e-6)
    handle.revert()
    assert not changed(before)
    after = step(teacher)
    assert after[0] == expected[0]
    for module, old in zip(teacher.modules(), attributes, strict=True):
        assert vars(module).keys() == old.keys()


def test_reverting_leaves_nothing_on_the_model() -> None:
    model = tiny("llama")
    before = [{k: id(v) for k, v in vars(m).items()} for m in model.modules()]
    names = list(model.state_dict())
    handle = only_kernels(model)
    assert list(model.state_dict()) == names
    assert kernel_bindings(model) == handle.report.kernels.applied == 9
    handle.revert()
    assert [{k: id(v) for k, v in vars(m).items()} for m in model.modules()] == before


def test_kernels_stop_with_the_switch_and_in_bypass() -> None:
    from lightning_liger.patching import bypass

    model = tiny("llama")
    expected = step(model)
    handle = only_kernels(model)
    calls = lambda: [op.calls for op in handle.report.kernels.ops.values()]  # noqa: E731
    with handle.paused():
        assert step(model)[0] == expected[0]
    with bypass("test"):
        assert step(model)[0] == expected[0]
    assert calls() == [0] * len(calls())
    step(model)
    assert all(calls())


class Distil(Plain):
    """A frozen teacher of the same class is a submodule."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__(student, lr=0.05)
        self.teacher = teacher.requires_grad_(False).eval()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = {k: v for k, v in batch.items() if k != "labels"}
        with torch.no_grad():
            target = self.teacher(**batch).logits.softmax(-1)
        return -(self.model(**batch).logits.log_softmax(-1) * target)[batch["attention_mask"].bool()].sum(-1).mean()


def test_a_frozen_teacher_is_accelerated_too(unchanged_process: Any) -> None:
    def run(callback: LigerCallback | None) -> Any:
        data = DataLoader(documents(2, longest=8), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
        return fit(Distil(tiny("llama"), tiny("llama", seed=1)), data, callback, max_steps=1)

    plain = run(None)
    ours = run(LigerCallback(kernels=True, padding_free=False, fused_head=False, verbose=False))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert ours.gradients[0].keys() == plain.gradients[0].keys()
    assert all(n.startswith("model.") for n in ours.gradients[0]), "the teacher is frozen"
    for name, g in plain.gradients[0].items():
        torch.testing.assert_close(ours.gradients[0][name], g, rtol=1e-4, atol=1e-6)
    ops = ours.report["kernels"]["ops"]
    assert ops["rms_norm"]["applied"] == 10 and ops["rms_norm"]["calls"] == 10


def test_a_teacher_accelerated_on_its_own_is_left_alone_by_the_outer_call() -> None:
    module = Distil(tiny("llama"), tiny("llama", seed=1))
    inner = only_kernels(module.teacher)
    outer = only_kernels(module)
    assert inner.report.kernels.applied == outer.report.kernels.applied == 9
    assert "accelerated by another accelerate() call" in " ".join(outer.report.kernels.reasons())
    outer.revert()
    assert inner.is_active and kernel_bindings(module) == 9
    module.teacher(**batch())
    assert inner.report.kernels.ops["rms_norm"].calls == 5
    inner.revert()
    assert not any("forward" in vars(m) for m in module.modules())


def test_one_norm_used_twice_is_bound_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.same = self.norm
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.same(x + self.linear(self.norm(x)))

    torch.manual_seed(0)
    module, x = Twice(), torch.randn(3, 16)
    expected = module(x)
    expected.square().sum().backward()
    plain = gradients(module)
    handle = only_kernels(module)
    assert handle.report.kernels.ops["layer_norm"].applied == 1
    out = module(x)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected)
    for name, g in gradients(module).items():
        torch.testing.assert_close(g, plain[name], rtol=1e-5, atol=1e-5)
    assert handle.report.kernels.ops["layer_norm"].calls == 2


def test_eval_mode_and_no_grad() -> None:
    model = tiny("llama").eval()
    expected = model(**batch()).logits
    handle = accelerate(model, only_kernels(tiny("llama")).settings)
    with torch.inference_mode():
        torch.testing.assert_close(model(**batch()).logits, expected, rtol=1e-5, atol=1e-5)
    assert handle.report.kernels.ops["rope"].calls == 2


def test_generate_runs_the_original_code() -> None:
    model = tiny("llama").eval()
    ids = batch(rows=1, length=4)["input_ids"]
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    handle = only_kernels(model)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)
    assert handle.report.kernels.ops["rms_norm"].calls == 0


def test_the_comparison_leaves_the_tuning_of_experts_as_it_was() -> None:
    from liger_kernel.ops import fused_moe_kernels

    kernel = fused_moe_kernels._fused_up_proj_swiglu_kernel
    several = [kernel.configs[0]] * 3
    before, kernel.configs = kernel.configs, several
    seen: list[int] = []
    original = type(kernel).run if hasattr(type(kernel), "run") else None
    assert original is not None

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(self.configs))
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(kernel), "run", run)
        try:
            only_kernels(tiny("mixtral"))
            assert kernel.configs is several
        finally:
            kernel.configs = before
    assert set(seen) == {1}
