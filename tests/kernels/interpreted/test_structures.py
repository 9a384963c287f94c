"""Modules of no known library: found by structure, told apart by numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from models import only_kernels
from torch import Tensor

from lightning_liger.kernels.registry import KernelBinding

WIDTH = 16


class RMS(nn.Module):
    """The variants that are around: where it rounds, what it adds to the weight, what its epsilon is called."""

    def __init__(self, eps_name: str = "eps", eps: float = 1e-6, add: float = 0.0, late: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.eps_name, self.add, self.late = eps_name, add, late
        setattr(self, eps_name, eps)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + getattr(self, self.eps_name))
        if self.late:
            return (y * (self.add + self.scale.float())).to(x.dtype)
        return y.to(x.dtype) * (self.add + self.scale)


class RMSNormTune(nn.Module):
    """As in torchtune: everything in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape, self.eps = (WIDTH,), 1e-6
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), normalized_shape=self.normalized_shape, weight=self.scale, eps=self.eps).to(
            x.dtype
        )


class NanoLayerNorm(nn.Module):
    """As in nanoGPT: an optional bias and a constant epsilon."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class Gated(nn.Module):
    def __init__(self, act: Any, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        super().__init__()
        self.act, self.names = act, names
        for name, size in zip(names, ((WIDTH, 24), (WIDTH, 24), (24, WIDTH)), strict=True):
            setattr(self, name, nn.Linear(*size, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, n) for n in self.names)
        return down(self.act(gate(x)) * up(x))


class Fused(nn.Module):
    def __init__(self, act: Any, up_first: bool = False) -> None:
        super().__init__()
        self.act, self.up_first = act, up_first
        self.gate_up = nn.Linear(WIDTH, 48)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(b) * a if self.up_first else self.act(a) * b)


class Clamped(Gated):
    """Equal to a plain one until a value gets large."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x).clamp(max=10.0)) * self.up_proj(x))


class LearnedBeta(Gated):
    """SwiGLU with a learned slope."""

    def __init__(self) -> None:
        super().__init__(F.silu)
        self.beta = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.sigmoid(self.beta * gate) * self.up_proj(x))


class Dropped(Gated):
    def __init__(self) -> None:
        super().__init__(F.silu)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class ClampedBoth(Gated):
    """As in DeepSeek V4."""

    def __init__(self, limit: float = 0.5) -> None:
        super().__init__(F.silu)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        up = self.up_proj(x).clamp(min=-self.limit, max=self.limit)
        return self.down_proj(self.act(gate) * up)


class GatedNorm(nn.Module):
    """As in Qwen 3 Next (the norm first) and in Mamba 2 (the gate first)."""

    def __init__(self, gate_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.variance_epsilon, self.gate_first = 1e-6, gate_first

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        y = hidden_states.float()
        if self.gate_first and gate is not None:
            y = y * F.silu(gate.float())
        y = self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(hidden_states.dtype)
        if not self.gate_first and gate is not None:
            y = y * F.silu(gate.float())
        return y.to(hidden_states.dtype)


class NanoMLP(nn.Module):
    """As in nanoGPT: no gate, and so no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.mlp = NanoLayerNorm(False), NanoLayerNorm(False), NanoMLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.ln_2(x + self.mlp(self.ln_1(x)))


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def check(module: nn.Module, op: str | None) -> Any:
    """Forward and gradients agree with an untouched copy, and the kernel of ``op`` is what ran."""
    torch.manual_seed(0)
    root = nn.ModuleList([module])
    plain = copy.deepcopy(module)
    accelerated = only_kernels(root)
    x = torch.randn(2, 3, WIDTH)
    results = []
    for m in (plain, module):
        y = x.clone().requires_grad_()
        out = m(y)
        results.append([out, *torch.autograd.grad(out.square().sum(), [y, *m.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    ops = accelerated.report.kernels.ops
    assert {name: o.calls for name, o in ops.items() if o.calls} == ({op: 1} if op else {})
    if op:
        assert isinstance(module.__dict__["forward"], KernelBinding)
        assert ops[op].sources == {"structural": 1}
    else:
        assert "forward" not in module.__dict__
    accelerated.revert()
    assert "forward" not in module.__dict__
    return accelerated


@pytest.mark.parametrize("eps_name", ("variance_epsilon", "eps", "norm_eps", "epsilon"))
def test_rms_norm_by_the_name_of_its_epsilon(eps_name: str) -> None:
    check(RMS(eps_name, eps=3e-4), "rms_norm")


@pytest.mark.parametrize("add", (0.0, 1.0))
@pytest.mark.parametrize("late", (False, True))
def test_rms_norm_variants(add: float, late: bool) -> None:
    module = RMS(add=add, late=late)
    accelerated = only_kernels(nn.ModuleList([module]))
    spec = module.__dict__["forward"].spec
    assert spec.offset == add and spec.casting_mode == ("gemma" if late else "llama")
    accelerated.revert()
    check(module, "rms_norm")


@pytest.mark.parametrize("make", (RMSNormTune, lambda: nn.RMSNorm(WIDTH), lambda: nn.RMSNorm(WIDTH, eps=1e-5)))
def test_other_rms_norms(make: Any) -> None:
    check(make(), "rms_norm")


@pytest.mark.parametrize("make", (lambda: nn.LayerNorm(WIDTH), lambda: nn.LayerNorm(WIDTH, bias=False)))
def test_torch_layer_norm(make: Any) -> None:
    check(make(), "layer_norm")


@pytest.mark.parametrize("bias", (True, False))
def test_nanogpt_layer_norm(bias: bool) -> None:
    check(NanoLayerNorm(bias), "layer_norm")


def test_a_norm_that_adds_something_else_is_refused_with_its_error() -> None:
    report = check(RMS(add=0.5), None).report.kernels
    assert report.ops["rms_norm"].found == 1
    (reason,) = report.ops["rms_norm"].refused
    assert reason.startswith("RMS computes something else than the kernel (fp32 differs by ")


@pytest.mark.parametrize(
    ("act", "op"), ((F.silu, "swiglu"), (nn.SiLU(), "swiglu"), (F.gelu, "geglu"), (tanh_gelu, "geglu"))
)
def test_gated_mlp_by_its_activation(act: Any, op: str) -> None:
    check(Gated(act), op)


@pytest.mark.parametrize("names", (("w1", "w3", "w2"), ("fc_1", "fc_2", "proj"), ("left", "right", "back")))
def test_gated_mlp_by_shape_not_by_name(names: tuple[str, str, str]) -> None:
    check(Gated(F.silu, names), "swiglu")


def test_gate_and_up_are_told_apart() -> None:
    module = Gated(F.silu, ("b", "a", "c"))
    module._modules = {n: module._modules[n] for n in ("a", "b", "c")}  # defined in another order than used
    only_kernels(nn.ModuleList([module]))
    spec = module.__dict__["forward"].spec
    assert (spec.gate, spec.up, spec.down) == ("b", "a", "c")


def test_a_square_mlp() -> None:
    module = Gated(F.silu)
    module.gate_proj, module.up_proj, module.down_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    check(module, "swiglu")


@pytest.mark.parametrize("act", (F.silu, tanh_gelu, F.gelu))
@pytest.mark.parametrize("up_first", (False, True))
def test_fused_gate_and_up(act: Any, up_first: bool) -> None:
    check(Fused(act, up_first), "swiglu" if act is F.silu else "geglu")


def test_a_clamped_mlp() -> None:
    check(ClampedBoth(), "swiglu")


@pytest.mark.parametrize("gate_first", (False, True))
def test_a_norm_with_a_gate(gate_first: bool) -> None:
    torch.manual_seed(0)
    module = GatedNorm(gate_first)
    plain = copy.deepcopy(module)
    handle = only_kernels(nn.ModuleList([module]))
    results = []
    for m in (module, plain):
        generator = torch.Generator().manual_seed(1)
        x, gate = (torch.randn(2, 3, WIDTH, generator=generator).requires_grad_() for _ in range(2))
        out = m(x, gate)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, gate, m.weight])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module(x), plain(x))
    op = handle.report.kernels.ops["rms_norm"]
    assert (op.applied, op.calls) == (1, 1)
    assert op.original_calls == {"GatedNorm: not called with two tensors": 1}


def test_squared_relu() -> None:
    from transformers.activations import ReLUSquaredActivation

    check(ReLUSquaredActivation(), "relu_squared")


def test_a_block_of_nanogpt() -> None:
    torch.manual_seed(0)
    block = NanoBlock()
    plain = copy.deepcopy(block)
    report = only_kernels(block).report.kernels
    x = torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(block(x), plain(x), rtol=1e-5, atol=1e-5)
    assert {k: (o.applied, o.found) for k, o in report.ops.items()} == {"layer_norm": (2, 2)}


class Experts(nn.Module):
    def __init__(self, e: int = 2, h: int = WIDTH, i: int = 24, bias: bool = False, turned: bool = False) -> None:
        super().__init__()
        shapes = ((e, h, 2 * i), (e, i, h)) if turned else ((e, 2 * i, h), (e, h, i))
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.zeros(s)) for s in shapes)
        if bias:
            self.down_proj_bias = nn.Parameter(torch.zeros(e, h))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError("never asked")


@pytest.mark.parametrize(
    ("options", "reason"),
    (
        ({"bias": True}, "the expert kernel has no place for down_proj_bias"),
        ({"turned": True}, "its weights are not stored as the expert kernel reads them, (E, 2 I, H) and (E, H, I)"),
        ({}, "it clamps its gate at limit=7.0, which the expert kernel does not"),
    ),
)
def test_experts_that_no_kernel_fits_say_why(options: dict[str, bool], reason: str) -> None:
    experts = Experts(**options)
    if not options:
        experts.limit = 7.0
    op = only_kernels(nn.ModuleList([experts])).report.kernels.ops["swiglu"]
    assert (op.applied, op.refused) == (0, {f"Experts: {reason}": 1})


@pytest.mark.parametrize("make", (lambda: Gated(F.relu), lambda: Clamped(F.silu), LearnedBeta, Dropped))
def test_what_only_looks_like_a_gated_mlp_is_left_alone(make: Any) -> None:
    module = make().eval()
    check(module, None)


def test_plain_mlps_and_attention_are_not_even_mentioned() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(WIDTH * 2, WIDTH), nn.PReLU(WIDTH))
    accelerated = only_kernels(nn.ModuleList([module, nn.TransformerEncoderLayer(WIDTH, 2)]))
    report = accelerated.report.kernels
    assert {k: o.found for k, o in report.ops.items()} == {"layer_norm": 2}
    assert not report.reasons()


def test_one_comparison_for_modules_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_liger.kernels import apply

    calls: list[str] = []
    real = apply.verify
    monkeypatch.setattr(apply, "verify", lambda p, m, d: (calls.append(p.op), real(p, m, d))[1])
    only_kernels(nn.ModuleList([RMS() for _ in range(5)] + [RMS(eps=1e-3)]))
    assert calls == ["rms_norm"] * 2


def test_the_comparison_moves_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those of any accelerator: ``torch.manual_seed`` would reseed them all, also such as were never touched."""

    def touched(*args: Any) -> None:
        raise AssertionError("a generator of an accelerator was seeded")

    module = nn.ModuleList([RMS(), Gated(F.silu), nn.LayerNorm(WIDTH)])
    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched)
    monkeypatch.setattr(torch.cuda, "manual_seed", touched)
    before = torch.get_rng_state()
    assert only_kernels(module).report.kernels.applied == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_the_comparison_depends_on_nothing_around_it() -> None:
    """Default dtype and device, inference mode, autocast: as Trainers and ``configure_model`` leave them."""
    module = nn.ModuleList([RMS(), Gated(F.silu), nn.LayerNorm(WIDTH)])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert only_kernels(module).report.kernels.applied == 3
            assert torch.empty(1).is_meta and torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
