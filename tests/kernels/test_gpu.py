"""Kernels at real widths on a CUDA device, seen by the profiler.

litgpt's pins contradict transformers 5; its models run without its dependencies: ``pip install --no-deps litgpt``.
"""

from __future__ import annotations

import copy
import os
from typing import Any

# before Triton's first import: tuning some 200 variants of the expert kernels takes minutes and proves nothing here
os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from rotary_cases import CASES, NeighboursRotary, assert_alike, calling, rotary_case
from torch import Tensor

from lightning_liger import LigerCallback, Settings, accelerate

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

# two layers of: hidden, intermediate, heads, key/value heads, head size
WIDTHS: dict[str, tuple[int, int, int, int, int]] = {
    "llama": (4096, 14336, 32, 8, 128),
    "qwen2": (3584, 18944, 28, 4, 128),
    "qwen3": (4096, 12288, 32, 8, 128),
    "mistral": (4096, 14336, 32, 8, 128),
    "gemma": (2048, 16384, 8, 1, 256),
    "gemma2": (2304, 9216, 8, 4, 256),
    "phi3": (3072, 8192, 32, 32, 96),
    "granite": (2048, 8192, 32, 8, 64),
    "olmo2": (4096, 11008, 32, 32, 128),
    "mixtral": (2048, 4096, 16, 8, 128),
}
NORMS_PER_LAYER = {"qwen3": 4, "gemma2": 4, "olmo2": 4}
VOCAB, LAYERS = 1024, 2


@pytest.fixture(autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


def build(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    hidden, intermediate, heads, kv, head_dim = WIDTHS[kind]
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": intermediate, "head_dim": head_dim}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv, "num_hidden_layers": LAYERS}
    sizes |= {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "phi3":
        sizes.pop("head_dim")
    if kind == "mixtral":
        # every expert for every token: a choice that rounding turns over says nothing about a kernel
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 4}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).train()
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data += 0.3 * torch.randn_like(p)
    return model.to(dtype)


def step(model: Any, tokens: int = 512) -> tuple[float, dict[str, Tensor]]:
    ids = torch.randint(3, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), grads


def apart(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to the norm of all of them together."""
    assert ours.keys() == plain.keys()
    whole = sum(float(g.double().norm()) ** 2 for g in plain.values()) ** 0.5
    return max(float((ours[n].double() - g.double()).norm()) for n, g in plain.items()) / whole


def kernels_of(function: Any) -> set[str]:
    """Names of the GPU kernels that ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        function()
        torch.cuda.synchronize()
    return {e.key for e in profiler.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA}


def only_kernels(module: Any, kernels: Any = True) -> Any:
    return accelerate(module, Settings(padding_free=False, fused_head=False, kernels=kernels))


@pytest.mark.parametrize("kind", WIDTHS)
def test_bf16_at_real_widths(kind: str) -> None:
    model = build(kind, torch.bfloat16)
    plain = step(model)
    reference = step(copy.deepcopy(model).float())
    handle = only_kernels(model)
    ops = handle.report.kernels.ops
    mlp = "geglu" if kind.startswith("gemma") else "swiglu"
    norms = NORMS_PER_LAYER.get(kind, 2) * LAYERS + 1
    applied = {op: (o.applied, o.found) for op, o in ops.items()}
    assert applied == {"rms_norm": (norms, norms), mlp: (LAYERS, LAYERS), "rope": (LAYERS, LAYERS)}, ops
    result: list[Any] = []
    seen = kernels_of(lambda: result.append(step(model)))
    (ours,) = result
    assert abs(ours[0] - reference[0]) <= 1.5 * abs(plain[0] - reference[0]) + 2e-3
    assert apart(ours[1], reference[1]) <= 1.1 * apart(plain[1], reference[1]) + 1e-4
    for op in ops.values():
        assert op.calls and not op.original_calls, op
    proofs = {"rms_norm": ("_rms_norm_forward_kernel", "_rms_norm_backward_kernel"), "rope": ("_triton_rope",)}
    proofs[mlp] = ("_geglu_tanh_forward_kernel", "_geglu_tanh_backward_kernel")
    if mlp == "swiglu":
        proofs[mlp] = ("_swiglu_forward_kernel", "_swiglu_backward_kernel")
    if kind == "mixtral":
        proofs[mlp] = ("_fused_up_proj_swiglu_kernel", "_fused_down_proj_kernel", "_moe_bwd_down_proj_kernel")
    for op, names in proofs.items():
        for name in names:
            assert any(name in kernel for kernel in seen), (op, name, sorted(seen))
            assert any(part in name for part in ops[op].kernels), "the registry's proof names it"
    handle.revert()
    again: list[Any] = []
    seen = kernels_of(lambda: again.append(step(model)))
    assert not any(part in kernel for kernel in seen for op in ops.values() for part in op.kernels)


@pytest.mark.parametrize("kind", [k for k in WIDTHS if k != "mixtral"])
def test_fp32_at_real_widths(kind: str) -> None:
    model = build(kind)
    plain = step(model, tokens=128)
    handle = only_kernels(model)
    ours = step(model, tokens=128)
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    assert apart(ours[1], plain[1]) < 1e-5
    assert all(op.calls and not op.original_calls for op in handle.report.kernels.ops.values())


def test_experts_in_fp32_run_their_own_code() -> None:
    model = build("mixtral")
    plain = step(model, tokens=64)
    handle = only_kernels(model)
    ours = step(model, tokens=64)
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    assert "TF32" in next(iter(handle.report.kernels.ops["swiglu"].original_calls))


@pytest.mark.parametrize("name", ("pythia-1b", "Llama-3.2-1B", "Gemma-2b"))
def test_litgpt(name: str) -> None:
    pytest.importorskip("litgpt")
    from litgpt.config import Config
    from litgpt.model import GPT

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(Config.from_name(name, n_layer=LAYERS, padded_vocab_size=VOCAB)).bfloat16()
        ids = torch.randint(0, VOCAB, (2, 256))
    model.max_seq_length = 256

    def run() -> tuple[float, dict[str, Tensor]]:
        loss = F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
        loss.backward()
        grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return float(loss.detach()), grads

    plain = run()
    handle = only_kernels(model)
    result: list[Any] = []
    seen = kernels_of(lambda: result.append(run()))
    assert result[0][0] == pytest.approx(plain[0], rel=5e-3)
    assert apart(result[0][1], plain[1]) < 2e-2
    ops = handle.report.kernels.ops
    assert {o.applied for o in ops.values()} - {0} and all(o.applied == o.found for o in ops.values()), ops
    assert ops["rope"].calls == 2 * LAYERS
    assert any("_triton_rope" in kernel for kernel in seen)
    norm = "_layer_norm_forward_kernel" if name.startswith("pythia") else "_rms_norm_forward_kernel"
    assert any(norm in kernel for kernel in seen)


@pytest.mark.parametrize("name", CASES)
def test_rotary_functions_of_transformers(name: str) -> None:
    function, args, kwargs = rotary_case(name)
    args = tuple(a.cuda() for a in args)
    layer = calling(function)
    handle = only_kernels(nn.ModuleList([layer]))
    seen = kernels_of(lambda: assert_alike(layer, function, args, **kwargs))
    op = handle.report.kernels.ops["rope"]
    assert (op.applied, op.called, op.calls, op.original_calls) == (1, 1, 2, {})
    assert any(part in kernel for kernel in seen for part in op.kernels)


def test_a_rotary_module_like_torchtunes() -> None:
    module, plain = (NeighboursRotary(dim=128, length=512).cuda() for _ in range(2))
    handle = only_kernels(nn.ModuleList([module]))
    x = torch.randn(2, 256, 32, 128, device="cuda")
    positions = torch.randint(0, 512, (2, 256), device="cuda")
    seen = kernels_of(
        lambda: torch.testing.assert_close(
            module(x, input_pos=positions), plain(x, input_pos=positions), rtol=1e-5, atol=1e-5
        )
    )
    assert handle.report.kernels.ops["rope"].calls == 1
    assert any("_llama4_rope_kernel" in kernel for kernel in seen)


# gates on norms, clamped gates, experts, rotations of neighbours, of parts and of complex numbers, squared ReLU
OTHERS = ("glm4", "deepseek_v2", "deepseek_v3", "deepseek_v4", "llama4_text", "qwen3_next", "qwen3_moe", "nemotron")


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_architectures_tiny_in_fp32(model_type: str) -> None:
    from test_every_type import build as tiny
    from test_every_type import step as one_step

    try:
        model = tiny(model_type).cuda()
        plain, expected = one_step(model)
    except Exception as error:  # another version's configuration or another version's needs
        pytest.skip(f"{model_type} does not run plain here: {type(error).__name__}: {error}"[:200])
    handle = only_kernels(model)
    ours, grads = one_step(model)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert apart(grads, expected) < 1e-5
    for name, op in handle.report.kernels.ops.items():
        aside = [r for r in op.original_calls if "TF32" not in r]
        assert not aside, (name, aside)
        assert op.called or op.original_calls or not op.applied, (name, op)


def test_applying_moves_no_random_numbers() -> None:
    model = build("llama", torch.bfloat16)
    before = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    handle = only_kernels(model)
    assert handle.report.kernels.applied
    after = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_two_models_of_one_class() -> None:
    student = build("llama", torch.bfloat16)
    teacher = copy.deepcopy(student)
    expected = step(teacher)
    handle = only_kernels(student)
    part = [p for op in handle.report.kernels.ops.values() for p in op.kernels]
    result: list[Any] = []
    seen = kernels_of(lambda: result.append(step(teacher)))
    assert not any(p in kernel for kernel in seen for p in part), "the teacher runs no kernel of ours"
    assert result[0][0] == pytest.approx(expected[0], abs=1e-4)


def test_auto_in_a_trainer() -> None:
    """Applied on the CPU, before the strategy moves the model."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build("granite", torch.bfloat16).cpu()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    callback = LigerCallback(verbose=False)
    data = torch.utils.data.DataLoader(torch.randint(3, VOCAB, (4, 128)), batch_size=2)  # type: ignore[arg-type, var-annotated]
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=2,
        precision="bf16-true",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), data)
    ops = callback.report.kernels.ops
    assert {k: o.applied for k, o in ops.items()} == {"rms_norm": 5, "swiglu": 2, "rope": 2}
    assert all(o.calls for o in ops.values())
