"""Copies of an accelerated model: deep copies, pickles, saved modules, averaged models."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from models import batch, kernel_bindings, only_kernels, step, tiny
from torch.optim.swa_utils import AveragedModel

from lightning_liger import Settings, accelerate
from lightning_liger.patching import bindings_of

KINDS = ("llama", "gemma2")


@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_runs_its_own_parameters_and_follows_the_switch(kind: str) -> None:
    model = tiny(kind)
    handle = only_kernels(model)
    step(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.1)
    plain = tiny(kind)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(1.1)
    before = {k: op.calls for k, op in handle.report.kernels.ops.items()}
    loss, grads = step(twin)
    expected, expected_grads = step(plain)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, g in expected_grads.items():
        torch.testing.assert_close(grads[name], g, rtol=1e-4, atol=1e-5)
    assert all(op.calls > before[k] for k, op in handle.report.kernels.ops.items()), "the copy runs kernels too"
    handle.revert()
    after = {k: op.calls for k, op in handle.report.kernels.ops.items()}
    assert step(twin)[0] == expected, "silenced with the original"
    assert {k: op.calls for k, op in handle.report.kernels.ops.items()} == after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ("pickle", "torch.save"))
def test_a_pickled_module_comes_back_plain_and_can_be_accelerated_again(kind: str, how: str) -> None:
    model = tiny(kind)
    handle = only_kernels(model)
    step(model)  # a rope binding builds its function on first use
    if how == "pickle":
        back = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        back = torch.load(file, weights_only=False)
    calls = [op.calls for op in handle.report.kernels.ops.values()]
    assert step(back)[0] == step(tiny(kind))[0], "bit for bit the original code"
    assert [op.calls for op in handle.report.kernels.ops.values()] == calls
    again = only_kernels(back)
    assert again.report.kernels.applied == handle.report.kernels.applied
    step(back)
    assert all(op.calls for op in again.report.kernels.ops.values())
    again.revert()
    assert kernel_bindings(back) == 0


def test_state_dicts_are_exchanged_freely() -> None:
    plain, ours = tiny("qwen3"), tiny("qwen3", seed=1)
    names = list(ours.state_dict())
    only_kernels(ours)
    assert list(ours.state_dict()) == names == list(plain.state_dict())
    ours.load_state_dict(plain.state_dict())
    assert step(ours)[0] == pytest.approx(step(plain)[0], rel=1e-6)
    tiny("qwen3", seed=2).load_state_dict(ours.state_dict())


def test_an_averaged_copy() -> None:
    model = tiny("llama")
    only_kernels(model)
    average = AveragedModel(model)
    average.update_parameters(model)
    out = average(**batch()).loss
    torch.testing.assert_close(out, model(**batch()).loss)


def test_a_pickled_module_is_plain_however_many_methods_were_stacked() -> None:
    model = tiny("llama")
    handle = accelerate(model, Settings(padding_free=False, fused_head=False, kernels=True, tiled_mlp=5))
    assert any(len(list(bindings_of(m))) > 1 for m in model.modules())
    back = pickle.loads(pickle.dumps(model))
    assert step(back)[0] == step(tiny("llama"))[0], "bit for bit the original code"
    assert only_kernels(back).report.kernels.applied == handle.report.kernels.applied
