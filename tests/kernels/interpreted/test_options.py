"""The ``kernels`` option and third-party kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import batch, kernel_bindings, only_kernels, step, tiny
from torch import Tensor

from lightning_liger import LigerCallback, Settings, accelerate
from lightning_liger.kernels import KernelBinding, KernelPatch, known_ops, register_kernel, unregister_kernel
from lightning_liger.kernels.standin import stand_in


def applied(kernels: Any) -> dict[str, int]:
    model = tiny("llama")
    handle = only_kernels(model, kernels)
    loss = step(model)[0]
    assert loss == pytest.approx(step(tiny("llama"))[0], rel=1e-5)
    ops = handle.report.kernels.ops
    assert all((o.calls > 0) == (o.applied > 0) for o in ops.values())
    return {k: o.applied for k, o in ops.items() if o.applied}


@pytest.mark.parametrize(
    ("kernels", "expected"),
    (
        (True, {"rms_norm": 5, "swiglu": 2, "rope": 2}),
        (False, {}),
        ({"rms_norm": True}, {"rms_norm": 5}),
        ({"rms_norm": True, "rope": True, "swiglu": False}, {"rms_norm": 5, "rope": 2}),
        ({"rope": False}, {}),
        ({"swiglu": True, "rope": "auto"}, {"swiglu": 2}),
        ({"geglu": True}, {}),
    ),
)
def test_single_ops(kernels: Any, expected: dict[str, int]) -> None:
    assert applied(kernels) == expected


def test_auto_is_off_without_a_gpu_and_says_so() -> None:
    model = tiny("llama")
    handle = accelerate(model)
    assert handle.report.kernels.off == "no CUDA device (kernels='auto')"
    assert kernel_bindings(model) == 0
    assert ("Kernels", "off", "no CUDA device (kernels='auto')") in handle.report.rows()


def test_an_op_that_is_off_is_counted_and_named() -> None:
    handle = only_kernels(tiny("llama"), {"rope": False, "rms_norm": True})
    ops = handle.report.kernels.ops
    assert (ops["rope"].found, ops["rope"].applied, ops["rope"].refused) == (2, 0, {"switched off": 2})
    assert ops["swiglu"].refused == {"no CUDA device (kernels='auto')": 2}, "left out: by the default's rule"


def test_what_a_mapping_leaves_out_follows_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU; the comparison itself stays on the CPU."""
    from lightning_liger.kernels import apply

    monkeypatch.setattr(apply.torch.cuda, "is_available", lambda: True)
    narrow = only_kernels(tiny("llama"), {"rms_norm": True}).report.kernels
    assert {k: o.applied for k, o in narrow.ops.items()} == {"rms_norm": 5, "swiglu": 0, "rope": 0}
    assert all("hidden size 32" in r for op in ("swiglu", "rope") for r in narrow.ops[op].refused)
    monkeypatch.setattr(apply, "_GPU_BOUND_WIDTH", 32)
    wide = only_kernels(tiny("llama"), {"rms_norm": False}).report.kernels
    assert {k: o.applied for k, o in wide.ops.items()} == {"rms_norm": 0, "swiglu": 2, "rope": 2}
    everything = only_kernels(tiny("llama"), "auto").report.kernels
    assert {k: o.applied for k, o in everything.ops.items()} == {"rms_norm": 5, "swiglu": 2, "rope": 2}


@pytest.mark.parametrize(
    ("kernels", "message"),
    (
        ("on", "expected 'auto', True, False, or ops such as"),
        (3, "expected 'auto', True, False, or ops such as"),
        ({"rmsnorm": True}, "unknown op 'rmsnorm'. Did you mean 'rms_norm'"),
        ({"xyz": True}, "Valid ops: rms_norm, layer_norm, swiglu, geglu, rope, relu_squared"),
        ({"rope": "yes"}, "'rope' must be True, False or 'auto'"),
    ),
)
def test_bad_values(kernels: Any, message: str) -> None:
    for make in (lambda: Settings(kernels=kernels), lambda: LigerCallback(kernels=kernels)):
        with pytest.raises(ValueError) as error:
            make()
        assert message in str(error.value)


def test_the_report_reads() -> None:
    model = tiny("qwen3")
    handle = only_kernels(model)
    model(**batch())
    rows = {row[0]: row[1:] for row in handle.report.rows()}
    assert rows["RMSNorm"] == ("9/9 (9 liger)", "9 calls")
    assert rows["RoPE"] == ("2/2 (2 liger)", "2 calls")
    assert not handle.report.nothing_to_accelerate
    made = handle.report.to_dict()["kernels"]["ops"]["rms_norm"]
    assert made["applied"] == made["found"] == 9
    assert made["kernels"] == ["_rms_norm_forward_kernel", "_rms_norm_backward_kernel"]


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x * x


class CubeBinding(KernelBinding):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.report.calls += 1
        return args[0].pow(3) if self.spec == 3 else args[0].pow(2)


class CubePatch(KernelPatch):
    op, title, kernels = "cube", "Cube", ("cube_kernel",)

    def match(self, module: nn.Module) -> bool:
        return type(module) is Cube

    def candidates(self, module: nn.Module) -> list[int]:
        return [2, 3]

    def trial(self, module: nn.Module, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return stand_in(module, {}, {}), (torch.randn(4, 8, device=device, requires_grad=True),)

    def binding(self, *args: Any) -> KernelBinding:
        return CubeBinding(*args)


@pytest.fixture
def cube() -> Iterator[CubePatch]:
    patch = CubePatch()
    register_kernel(patch)
    yield patch
    unregister_kernel(patch)


def test_a_kernel_of_your_own(cube: CubePatch) -> None:
    assert known_ops()[-1] == "cube"
    model = nn.Sequential(Cube(), nn.Linear(8, 8))
    x = torch.randn(3, 8)
    expected = model(x)
    handle = only_kernels(model, {"cube": True})
    torch.testing.assert_close(model(x), expected)
    op = handle.report.kernels.ops["cube"]
    assert (op.applied, op.calls, op.sources) == (1, 1, {"structural": 1})
    assert model[0].__dict__["forward"].spec == 3, "the candidate that squares was turned down"
    handle.revert()
    assert kernel_bindings(model) == 0
    assert only_kernels(nn.Sequential(Cube()), {"cube": False}).report.kernels.applied == 0


def test_an_op_is_only_known_while_it_is_registered() -> None:
    with pytest.raises(ValueError, match="unknown op 'cube'"):
        Settings(kernels={"cube": True})


def test_what_is_no_patch_is_an_error() -> None:
    with pytest.raises(TypeError, match="takes a KernelPatch, not str"):
        register_kernel("cube")  # type: ignore[arg-type]

    class Nameless(CubePatch):
        op = None  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"Nameless\.op must be a str\."):
        register_kernel(Nameless())
