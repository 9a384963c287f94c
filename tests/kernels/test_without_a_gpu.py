"""On a CPU, without the interpreter: kernels stay off, say why, and cost no import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers import Plain, assert_same, causal_lm, fit, loader

from lightning_liger import LigerCallback, Settings, accelerate
from lightning_liger.kernels import KernelBinding
from lightning_liger.kernels.apply import why_auto_is_off
from lightning_liger.kernels.device import why_not

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.mark.parametrize(
    ("kernels", "off"),
    (
        ("auto", "no CUDA device (kernels='auto')"),
        (True, "Triton kernels need a CUDA device (or TRITON_INTERPRET=1, for tests)"),
        ({"rope": True}, "Triton kernels need a CUDA device (or TRITON_INTERPRET=1, for tests)"),
        ({"rope": False}, "no CUDA device (kernels='auto')"),
        (False, "switched off (kernels=False)"),
    ),
)
def test_off_with_the_reason(kernels: object, off: str) -> None:
    model = causal_lm("llama")
    report = accelerate(model, Settings(kernels=kernels)).report  # type: ignore[arg-type]
    assert report.kernels.off == off
    assert ("Kernels", "off", off) in report.rows()
    assert not any(isinstance(vars(m).get("forward"), KernelBinding) for m in model.modules())


def test_auto_leaves_narrow_models_to_their_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be timed; what is timed is in tests/tuning."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_auto_is_off(causal_lm("llama")).startswith("hidden size 32: the step is bound by launches")


def test_asking_for_kernels_trains_the_same_without_them() -> None:
    plain = fit(Plain(causal_lm("llama")), loader())
    ours = fit(Plain(causal_lm("llama")), loader(), LigerCallback(kernels=True, verbose=False))
    assert_same(plain, ours)
    assert ours.report["kernels"] == {"off": why_not(), "applied": 0, "ops": {}}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else True)
    assert why_not() == "liger_kernel is not installed"


def test_importing_the_package_imports_neither_liger_nor_transformers() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import lightning_liger, lightning_liger.kernels.apply; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "assert not new & {'liger_kernel', 'transformers', 'peft'}, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
