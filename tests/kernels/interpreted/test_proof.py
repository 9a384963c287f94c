"""The kernel proof with real kernels: calls are counted, and a module without its kernel is named."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import Plain, fit, loader
from models import tiny

from lightning_liger import LigerCallback
from lightning_liger.proof.report import ProofError
from lightning_liger.trees import callback_bases

PATH = "model.model.layers.1.mlp"


class Restores(*callback_bases()):  # type: ignore[misc]
    """Takes the kernel of one module away behind our back."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        del vars(pl_module.get_submodule(PATH))["forward"]


def test_every_kernel_is_seen() -> None:
    run = fit(Plain(tiny("llama")), loader(), LigerCallback(verbose=False, kernels=True, verify="strict"), max_steps=1)
    assert run.report["proof"]["kernels"]["ran"] == {
        "padding": [1, 1],
        "RoPE": [2, 2],
        "attention": [2, 2],
        "SwiGLU": [2, 2],
        "RMSNorm": [5, 5],
        "head+loss": [1, 1],
    }


def test_a_restored_forward_is_named() -> None:
    callback = LigerCallback(verbose=False, kernels=True, verify="strict")
    with pytest.raises(ProofError, match=f"SwiGLU on {PATH}: its forward was replaced .* by LlamaMLP's own"):
        fit(Plain(tiny("llama")), loader(), callback, max_steps=1, callbacks=[Restores()])


def test_a_module_that_stands_aside_is_named_with_the_reason() -> None:
    callback = LigerCallback(verbose=False, kernels=True, padding_free=False)
    model = tiny("llama")
    model.model.norm.double()  # no dtype that kernels are compared in
    model.lm_head.double()
    run = fit(Plain(model), loader(), callback, max_steps=1)
    found = run.report["proof"]["kernels"]
    assert found["ran"]["RMSNorm"] == [4, 5]
    assert any("RMSNorm on model.model.norm: " in line for line in found["missing"])


def test_a_wrong_epsilon_in_a_wrapper_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound as right as ever, and changed afterwards: the comparison before binding cannot see it."""
    from lightning_liger.kernels import norms

    right = norms.rms_norm

    class Changes(Restores):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            monkeypatch.setattr(norms, "rms_norm", lambda x, w, eps, *rest: right(x, w, 100 * eps, *rest))

    callback = LigerCallback(verbose=False, kernels=True)
    with pytest.warns(UserWarning, match="RMSNorm computes something else than the plain code"):
        run = fit(Plain(tiny("llama")), loader(), callback, max_steps=2, callbacks=[Changes()])
    assert run.report["proof"]["equivalence"]["switched_off"] == ["RMSNorm"]
    ops = run.report["kernels"]["ops"]
    assert any("computes something else" in reason for reason in ops["rms_norm"]["refused"])
    assert ops["swiglu"]["calls"] == 4 and ops["rms_norm"]["calls"] == 5, "the others go on"


def test_kernels_agree_with_plain_code() -> None:
    run = fit(Plain(tiny("llama")), loader(), LigerCallback(verbose=False, kernels=True, verify="strict"), max_steps=1)
    found = run.report["proof"]["equivalence"]
    assert found["agreement"]["gradient_difference"] < 1e-5 and not found["skipped"]
