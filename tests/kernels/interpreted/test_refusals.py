"""What is left alone, and what is kept: activations, adapters, quantised layers, other people's patches."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import batch, gradients, only_kernels, step, tiny
from torch import Tensor


def assert_like(model: Any, plain: Any) -> None:
    loss, grads = step(model)
    expected, expected_grads = step(plain)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert grads.keys() == expected_grads.keys()
    whole = sum(float(g.norm()) ** 2 for g in expected_grads.values()) ** 0.5
    assert max(float((grads[n] - g).norm()) for n, g in expected_grads.items()) < 1e-5 * whole


@pytest.mark.parametrize(
    ("act", "op"), (("silu", "swiglu"), ("gelu", "geglu"), ("gelu_pytorch_tanh", "geglu"), ("relu", None))
)
def test_hidden_act_is_honoured(act: str, op: str | None) -> None:
    model = tiny("llama", hidden_act=act)
    handle = only_kernels(model)
    assert_like(model, tiny("llama", hidden_act=act))
    ops = handle.report.kernels.ops
    assert {k: o.applied for k, o in ops.items() if k in ("swiglu", "geglu") and o.applied} == ({op: 2} if op else {})
    if op is None:
        (reason,) = ops["swiglu"].refused
        assert "LlamaMLP computes something else than the kernel" in reason and ops["swiglu"].refused[reason] == 2


def test_post_norm_residuals() -> None:
    """The norm's output and its input both go on: gradients must not be written over the incoming one."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.linear(x))

    def run(kernels: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        x = torch.randn(4, 16, requires_grad=True)
        if kernels:
            assert only_kernels(model).report.kernels.ops["rms_norm"].applied == 2
        y = model(x)
        (y.square().sum() + y.sum()).backward()
        return x.grad, gradients(model)

    (x, ours), (x_plain, plain) = run(True), run(False)
    torch.testing.assert_close(x, x_plain, rtol=1e-5, atol=1e-5)
    for name, g in plain.items():
        torch.testing.assert_close(ours[name], g, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ("lora", "dora", "modules_to_save"))
@pytest.mark.parametrize("accelerate_first", (False, True))
def test_adapters_on_every_layer(kind: str, accelerate_first: bool) -> None:
    peft = pytest.importorskip("peft")

    def build(kernels: bool) -> tuple[Any, Any]:
        model = tiny("llama")
        handle = only_kernels(model) if kernels and accelerate_first else None
        saved = ["input_layernorm", "norm", "up_proj", "lm_head", "embed_tokens"] if kind == "modules_to_save" else None
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
        targets += [] if saved else ["up_proj", "lm_head"]
        config = peft.LoraConfig(target_modules=targets, use_dora=kind == "dora", modules_to_save=saved, r=4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = peft.get_peft_model(model, config)
            for name, p in model.named_parameters():
                if "lora_B" in name or "modules_to_save" in name:
                    p.data += 0.1 * torch.randn_like(p)
        if kernels and not accelerate_first:
            handle = only_kernels(model)
        return model, handle

    (model, handle), (plain, _) = build(True), build(False)
    assert_like(model, plain)
    ops = handle.report.kernels.ops
    assert all(ops[op].calls for op in ("rms_norm", "swiglu", "rope")), ops
    assert not handle.report.kernels.reasons()


def four_bit(model: Any) -> Any:
    """Every linear layer but the head in NF4, as ``BitsAndBytesConfig(load_in_4bit=True)`` leaves it."""
    bnb = pytest.importorskip("bitsandbytes")
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                made = bnb.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=child.bias is not None,
                    compute_dtype=torch.float32,
                    quant_type="nf4",
                )
                made.load_state_dict(child.state_dict())
                setattr(module, name, made.to("cpu").requires_grad_(False))  # packs the weight
    assert model.model.layers[0].mlp.gate_proj.weight.dtype == torch.uint8
    return model


def test_quantised_layers_are_compared_once_for_all() -> None:
    from lightning_liger.kernels.mlps import GatedMLPPatch

    model, patch = four_bit(tiny("llama")), GatedMLPPatch("swiglu")
    assert len({patch.key(layer.mlp) for layer in model.model.layers}) == 1


@pytest.mark.parametrize("adapted", (False, True))
def test_a_four_bit_base(adapted: bool) -> None:
    def build() -> Any:
        model = four_bit(tiny("llama"))
        if not adapted:
            return model
        peft = pytest.importorskip("peft")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4))
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.data += 0.1 * torch.randn_like(p)
        return model

    model = build()
    handle = only_kernels(model)
    assert handle.report.kernels.applied == 9
    assert_like(model, build())
    ops = handle.report.kernels.ops
    assert all(op.called == op.applied and not op.original_calls for op in ops.values()), ops


def test_a_forward_that_somebody_replaced_is_left_and_named() -> None:
    model = tiny("llama")
    norm, mlp = model.model.norm, model.model.layers[0].mlp

    def double(self: Any, x: Tensor) -> Tensor:
        return 2 * type(self).forward(self, x)

    norm.forward = types.MethodType(double, norm)
    theirs = norm.forward
    mlp.forward = lambda x: 0 * x
    handle = only_kernels(model)
    assert norm.__dict__["forward"] is theirs
    reasons = " ".join(handle.report.kernels.reasons())
    assert "LlamaRMSNorm: its forward was replaced by test_a_forward_that" in reasons and "double" in reasons
    assert "LlamaMLP: its forward was replaced by" in reasons
    ops = handle.report.kernels.ops
    assert (ops["rms_norm"].applied, ops["rms_norm"].found) == (4, 5)
    assert (ops["swiglu"].applied, ops["swiglu"].found) == (1, 2)
    handle.revert()
    assert norm.__dict__["forward"] is theirs


def test_a_patch_bound_over_ours_stays() -> None:
    model = tiny("llama")
    handle = only_kernels(model)
    norm = model.model.norm
    ours = norm.forward

    def double(x: Tensor) -> Tensor:
        return 2 * ours(x)

    norm.forward = double
    handle.revert()
    assert norm.forward is double
    x = torch.randn(2, 32)
    assert torch.equal(norm(x), 2 * type(norm).forward(norm, x)), "ours stands aside below theirs"


def test_a_class_that_somebody_patched_is_left_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def forward(self: Any, x: Tensor) -> Tensor:
        return x

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)
    report = only_kernels(tiny("llama")).report.kernels
    assert report.ops["rms_norm"].applied == 0
    assert "its class's forward was replaced by" in " ".join(report.ops["rms_norm"].refused)


def test_ligers_own_patches_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_kernel.transformers import LigerRMSNorm
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", liger_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", LigerRMSNorm)
    report = only_kernels(tiny("llama")).report.kernels
    assert report.ops["rms_norm"].applied == report.ops["rope"].applied == 0
    assert list(report.ops["rms_norm"].refused) == ["LigerRMSNorm: is Liger's already"]
    assert "is Liger's already, for every model of this process" in " ".join(report.ops["rope"].refused)


def test_compiled_modules_are_left() -> None:
    model = tiny("llama")
    model.model.layers[0].compile(backend="eager")
    report = only_kernels(model).report.kernels
    assert report.ops["rms_norm"].applied == 3 and report.ops["rms_norm"].found == 5
    assert report.ops["rms_norm"].refused == {"LlamaRMSNorm: compiled with torch.compile": 2}
    wrapped = torch.compile(tiny("llama"), backend="eager")
    assert only_kernels(wrapped).report.kernels.applied == 0


def test_a_kernel_under_compile_gives_way() -> None:
    model = tiny("llama")
    handle = only_kernels(model)
    expected = step(tiny("llama"))[0]
    compiled = torch.compile(model.model.layers[0].mlp, backend="eager")
    assert handle.report.kernels.ops["swiglu"].applied == 2
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(compiled(x), type(model.model.layers[0].mlp).forward(model.model.layers[0].mlp, x))
    assert step(model)[0] == pytest.approx(expected, rel=1e-5)


def test_inputs_that_a_kernel_does_not_know_run_the_original_code() -> None:
    model = tiny("llama")
    handle = only_kernels(model)
    norm = model.model.norm.double()
    norm(torch.randn(2, 32, dtype=torch.float64))
    norm.float()(torch.randn(0, 32))
    norm(hidden_states=torch.randn(2, 32))
    torch.func.vmap(norm)(torch.randn(2, 32))
    original = handle.report.kernels.ops["rms_norm"].original_calls
    assert {r.split(": ")[1] for r in original} == {
        "kernels are not compared in torch.float64",
        "the input is empty",
        "not called with one tensor",
        "inside a torch.func transform",
    }
    assert handle.report.kernels.ops["rms_norm"].calls == 0


def test_hooks_that_hold_activations_see_them_unchanged() -> None:
    def activations(kernels: bool) -> tuple[Tensor, Tensor]:
        model = tiny("llama")
        if kernels:
            only_kernels(model)
        held: list[Tensor] = []
        layer = model.model.layers[0]
        layer.mlp.gate_proj.register_forward_hook(lambda m, a, out: held.append(out))
        layer.self_attn.q_proj.register_forward_hook(lambda m, a, out: held.append(out))
        step(model)
        return held[0].detach(), held[1].detach()

    for ours, plain in zip(activations(True), activations(False), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", (False, True))
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = tiny("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    handle = only_kernels(model)
    assert_like(model, tiny("qwen3"))
    assert handle.report.kernels.ops["swiglu"].calls == 4, "recomputed with the kernel as well"


def test_two_backward_passes_through_one_graph() -> None:
    model = tiny("llama")
    only_kernels(model)
    loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    first = gradients(model)
    loss.backward()
    for name, g in gradients(model).items():
        torch.testing.assert_close(g, first[name], rtol=1e-6, atol=1e-7)
