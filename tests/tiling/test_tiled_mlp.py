"""MLPs in chunks of tokens train as whole ones do, in less memory, and those that cannot are left alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import transformers
from helpers import Plain, assert_same, causal_lm, collate, config, documents, fit, loader, relative_all
from torch import Tensor

from lightning_liger import LigerCallback, LigerFSDPStrategy, Settings, accelerate
from lightning_liger.parallel.recompute import recompute_blocks
from lightning_liger.patching import Switch
from lightning_liger.tiling import binding
from lightning_liger.tiling.chunks import in_chunks, parts
from lightning_liger.tiling.finding import find_mlps, why_not

sys.path.insert(0, str(Path(__file__).parents[1] / "strategy"))
from live_memory import Live

KINDS = ("qwen2", "llama", "gpt2", "gemma2")
EXACT = {"loss": 1e-6, "gradient": 1e-6, "parameter": 1e-6}


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mix, self.norm, self.mlp = nn.Linear(16, 16), nn.LayerNorm(16), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.cumsum(1))
        return x + self.mlp(self.norm(x))


class Own(nn.Module):
    """A decoder of nobody's library."""

    def __init__(self, mlps: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)
        self.blocks = nn.ModuleList(Block(mlp) for mlp in mlps)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.0))


def step(model: Any) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(**collate(documents(4, seed=3))).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def blocks_of(model: Any) -> list[nn.Module]:
    return list(model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each call of a llama's MLP."""
    made: list[int] = []
    original = transformers.models.llama.modeling_llama.LlamaMLP.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        made.append(x.numel() // x.shape[-1])
        return original(self, x)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", forward)
    yield made


# -- the same training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_whole_mlps_do(kind: str) -> None:
    plain = fit(Plain(causal_lm(kind)), loader(), LigerCallback(verbose=False))
    module = Plain(causal_lm(kind))
    tiled = fit(module, loader(), LigerCallback(verbose=False, tiled_mlp=7))
    assert_same(plain, tiled, **EXACT)
    found = tiled.report["tiled_mlp"]
    assert (found["applied"], found["found"], found["off"]) == (2, 2, [])
    assert found["calls"] > 0 and found["chunks"] >= 3
    assert not any("forward" in vars(m) for m in module.modules())


def test_a_model_of_nobodys_library() -> None:
    def module() -> Plain:
        torch.manual_seed(3)
        return Plain(Own([sequential() for _ in range(2)]), lr=0.05)

    plain = fit(module(), loader())
    tiled = fit(module(), loader(), LigerCallback(verbose=False, tiled_mlp=5))
    assert_same(plain, tiled, **EXACT)
    assert tiled.report["tiled_mlp"]["applied"] == 2 and tiled.report["tiled_mlp"]["calls"] > 0


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_under_the_strategy(checkpointing: Any) -> None:
    plain = fit(Plain(causal_lm("llama")), loader())
    strategy = LigerFSDPStrategy(bf16=False, activation_checkpointing=checkpointing)
    module = Plain(causal_lm("llama"))
    tiled = fit(module, loader(), LigerCallback(verbose=False, tiled_mlp=7), strategy=strategy)
    plain.gradients = tiled.gradients = []  # those of shards
    assert_same(plain, tiled)
    assert tiled.report["tiled_mlp"]["calls"] > 0


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_checkpoint_computes_nothing_twice_over(mode: str, calls: list[int]) -> None:
    model = causal_lm("llama")
    plain = step(model)
    recompute_blocks(blocks_of(model), mode, Switch(True), lambda _: None)
    accelerate(model, Settings(tiled_mlp=10))
    step(model)  # the first call looks at what the MLP uses
    calls.clear()
    found = step(model)
    assert found[0] == pytest.approx(plain[0], rel=1e-6) and relative_all(found[1], plain[1]) <= 1e-6
    chunks = len(parts(48, 10))
    assert len(calls) == 2 * 2 * chunks  # two layers, once forward and once in backward
    assert max(calls) <= 10


@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_transformers_own_checkpoints(reentrant: bool) -> None:
    model = causal_lm("llama")
    plain = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    handle = accelerate(model, Settings(tiled_mlp=10))
    found = step(model)
    assert found[0] == pytest.approx(plain[0], rel=1e-6) and relative_all(found[1], plain[1]) <= 1e-6
    assert handle.report.tiling.calls > 0


def test_adapters_on_frozen_mlps() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["gate_proj", "down_proj"], r=4, init_lora_weights=False)

    def module() -> Plain:
        model = causal_lm("llama")
        torch.manual_seed(5)
        return Plain(peft.get_peft_model(model, lora), lr=0.05)

    plain = fit(module(), loader())
    tiled = fit(module(), loader(), LigerCallback(verbose=False, tiled_mlp=7))
    assert_same(plain, tiled)
    assert tiled.report["tiled_mlp"]["applied"] == 2 and tiled.report["tiled_mlp"]["calls"] > 0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_in_compiled_blocks(checkpointed: bool) -> None:
    from lightning_liger.compilation.apply import compiled, stack_of
    from lightning_liger.compilation.block import Graphs

    graphs, said = [], []

    def backend(module: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(module)
        return aot_eager(module, inputs)

    model = causal_lm("qwen2")
    plain = step(model)
    if checkpointed:
        recompute_blocks(blocks_of(model), "full", Switch(True), lambda _: None)
    handle = accelerate(model, Settings(tiled_mlp=16, kernels=False, shape_buckets=True))
    for bound in compiled(stack_of(model.base_model), model.base_model, handle._switch, Graphs(backend, said.append)):
        handle._keep(bound)
    try:
        found = step(model)
        assert not said and len(graphs) == 1
        products = [n for n in str(graphs[0].print_readable(print_output=False)).splitlines() if "linear" in n]
        assert len([line for line in products if "mlp" in line]) >= 3 * len(parts(48, 16))
    finally:
        torch._dynamo.reset()
    assert found[0] == pytest.approx(plain[0], rel=1e-6) and relative_all(found[1], plain[1]) <= 2e-6


def test_bf16_errs_as_whole_mlps_do() -> None:
    exact = causal_lm("llama", hidden_size=64, intermediate_size=128)
    reference = step(exact)[1]
    errors = []
    for choice in (False, 3):
        model = causal_lm("llama", hidden_size=64, intermediate_size=128)
        model.to(torch.bfloat16)
        handle = accelerate(model, Settings(tiled_mlp=choice))
        found = step(model)[1]
        assert handle.report.tiling.calls == 2 * bool(choice)
        errors.append(relative_all({n: g.float() for n, g in found.items()}, reference))
    assert errors[1] <= 1.1 * errors[0], errors


def test_autocast() -> None:
    model = causal_lm("llama")
    with torch.autocast("cpu", torch.bfloat16):
        plain = step(model)
        accelerate(model, Settings(tiled_mlp=10))
        found = step(model)
    assert found[0] == pytest.approx(plain[0], rel=1e-3) and relative_all(found[1], plain[1]) <= 5e-3


def test_dropout_draws_the_same_in_backward() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 16), nn.Dropout(0.5))
    x = torch.randn(1, 20, 16, requires_grad=True)
    results = []
    for tiled in (False, True):
        torch.manual_seed(1)
        whole = torch.cat([mlp(x[:, part]) for part in parts(20, 6)], dim=1)
        if tiled:
            torch.manual_seed(1)
            whole = in_chunks(mlp, mlp, x, 6)
        after = torch.rand(())
        results.append([whole, after, *torch.autograd.grad(whole.sin().sum(), [x, *mlp.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "full"])
def test_one_chunk_of_intermediates_lives(mode: str) -> None:
    """The peak of forward and backward, less what a chunk and the weights' gradients take, is that of hidden states."""
    peaks = {}
    ids = torch.randint(3, 97, (1, 2048))
    for choice in (False, 64):
        model = causal_lm("llama", hidden_size=16, intermediate_size=512, max_position_embeddings=2048)
        model = model.base_model
        accelerate(model, Settings(tiled_mlp=choice, padding_free=False))
        if mode == "full":
            recompute_blocks(list(model.layers), "full", Switch(True), lambda _: None)
        with Live() as live:
            model(ids, use_cache=False).last_hidden_state.sum().backward()
        peaks[choice] = live.peak
    intermediate = 2048 * 512 * 4
    assert peaks[False] - peaks[64] > 3 * intermediate * (2 if mode == "none" else 1), (peaks, intermediate)


def test_the_plan_knows_chunks() -> None:
    from lightning_liger.parallel.activations import count_activations

    model = causal_lm("llama", intermediate_size=512)
    blocks = blocks_of(model)
    whole = count_activations(model.base_model, blocks, (1, 1024), None)
    accelerate(model, Settings(tiled_mlp=64))
    tiled = count_activations(model.base_model, blocks, (1, 1024), None)
    assert whole.block - tiled.block > 3 * 1024 * 512 * 4
    assert 0 < tiled.backward < whole.backward
    assert tiled.counted and tiled.entry == whole.entry


# -- what is left alone ------------------------------------------------------------------------------------------------


class MixesMLP(nn.Module):
    """Looks like an MLP, and looks at the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu().roll(1, dims=1))


class Borrows(nn.Module):
    def __init__(self, scale: list[nn.Parameter]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * self.scale[0])


def test_a_token_that_looks_at_others_is_refused() -> None:
    model = Own([MixesMLP(), MixesMLP()])
    suited, refused = find_mlps(model)
    assert suited == [] and refused == ["MixesMLP: a token's result depends on other tokens"]
    assert why_not(sequential()) == ""


def test_experts_are_refused_and_shared_ones_are_not() -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    made = transformers.Qwen2MoeConfig(**{**vars_of("qwen2"), **sizes, "shared_expert_intermediate_size": 48})
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM(made).train()
    suited, refused = find_mlps(model)
    assert len(suited) == 2 and all(
        m is block.mlp.shared_expert for m, block in zip(suited, model.model.layers, strict=True)
    )
    assert len(refused) == 1 and "mixture of experts" in refused[0]
    plain = step(model)
    accelerate(model, Settings(tiled_mlp=10))
    found = step(model)
    assert found[0] == pytest.approx(plain[0], rel=1e-6) and relative_all(found[1], plain[1]) <= 1e-6


def vars_of(kind: str) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    made = config(kind)
    return {n: getattr(made, n) for n in (*names, "num_key_value_heads", "pad_token_id")}


def test_foreign_parameters_and_hooks_are_left_alone() -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    torch.manual_seed(0)
    model = Own([Borrows([scale]), Borrows([scale])])
    model.scale = scale
    plain = step(model)
    handle = accelerate(model, Settings(tiled_mlp=10))
    found = step(model)
    assert relative_all(found[1], plain[1]) <= 1e-6 and "scale" in found[1]
    assert handle.report.tiling.off == ["Borrows: it uses parameters of other modules"]

    model = causal_lm("llama")
    plain = step(model)
    seen: list[Any] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    handle = accelerate(model, Settings(tiled_mlp=10))
    found = step(model)
    assert relative_all(found[1], plain[1]) <= 1e-6 and len(seen) == 1
    assert handle.report.tiling.calls == 1 and "a hook on its Linear" in handle.report.tiling.off[0]


def test_auto_waits_for_long_calls_that_are_recomputed(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    monkeypatch.setattr(binding, "AUTO_FROM", 40)
    monkeypatch.setattr(binding, "CHUNK", 10)
    model = causal_lm("llama")
    handle = accelerate(model, Settings(tiled_mlp="auto"))
    plain = step(model)
    assert handle.report.tiling.calls == 0 and handle.report.tiling.rows() == []
    recompute_blocks(blocks_of(model), "full", Switch(True), lambda _: None)
    found = step(model)
    assert handle.report.tiling.calls > 0 and "48 tokens in 5 chunks" in handle.report.tiling.rows()[0][2]
    assert relative_all(found[1], plain[1]) <= 1e-6
    monkeypatch.setattr(binding, "AUTO_FROM", 400)
    handle.report.tiling.restart()
    step(model)
    assert handle.report.tiling.calls == 0


@pytest.mark.parametrize("value", [0, -3, "yes", 2.5, None])
def test_a_bad_value_is_one_clear_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"tiled_mlp=.*'auto' or the tokens of a chunk, such as 8192"):
        LigerCallback(tiled_mlp=value)


def test_a_second_derivative_is_an_error() -> None:
    mlp = sequential()
    x = torch.randn(1, 20, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="tiled_mlp=False"):
        torch.autograd.grad(in_chunks(mlp, mlp, x, 6).sum(), x, create_graph=True)
