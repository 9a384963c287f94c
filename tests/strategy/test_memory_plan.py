"""The memory plan against what is really kept, and what it advises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import modules
import pytest
import torch
from helpers import QUIET, causal_lm
from live_memory import memory_after
from test_recompute import KINDS, blocks_of
from torch import Tensor

from lightning_liger import LigerCallback, LigerFSDPStrategy
from lightning_liger.kernels.mlps import GatedMLPBinding, GatedSpec
from lightning_liger.kernels.norms import RMSNormBinding
from lightning_liger.kernels.report import OpReport
from lightning_liger.parallel import memory_plan, planning
from lightning_liger.parallel.activations import Activations, count_activations, from_linear_layers
from lightning_liger.parallel.memory_plan import UNCOUNTED, MemoryPlan, State
from lightning_liger.parallel.optimizer_sizes import optimizer_bytes, state_factor
from lightning_liger.parallel.planning import read_batch
from lightning_liger.parallel.recompute import recompute_blocks
from lightning_liger.parallel.selecting import Product, Selection
from lightning_liger.patching import Switch

GIB = 2**30


def step_of(model: Any, ids: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(input_ids=ids, labels=ids, use_cache=False).loss, list(model.parameters())))


def kept_bytes(model: Any, ids: Tensor, *, cached: bool = False) -> int:
    """Distinct memory that a real forward of the decoder stack leaves for backward, without the parameters.

    Args:
        cached: also what selective checkpointing holds, which autograd does not know of.
    """
    if cached:
        return memory_after(lambda: model.base_model(ids, use_cache=False).last_hidden_state)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model.base_model(ids, use_cache=False).last_hidden_state
    del output
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 48), (1, 160)])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_those_of_a_real_forward(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    model = causal_lm(kind, num_hidden_layers=3, max_position_embeddings=256)
    if kind == "gpt2":
        model = causal_lm(kind, n_positions=256)
    model = model.to(dtype)
    if kind == "gemma2" and shape[0] == 1:
        pytest.skip("a single row is taken for a packed one, which has no scores")
    found = count_activations(model.base_model, blocks_of(model), shape, dtype)
    ids = torch.randint(3, 90, shape)
    real = kept_bytes(model, ids)
    assert found.counted
    assert found.kept("none", Selection()) == pytest.approx(real, rel=0.02), (found, real)
    estimated = from_linear_layers(blocks_of(model), shape[0] * shape[1], dtype).kept("none", Selection())
    # element-wise steps and scores are beyond it
    assert real / 4 < estimated < 1.3 * real, (estimated, real)


def test_nothing_is_changed_by_counting() -> None:
    model = causal_lm("llama")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state, implementation = torch.get_rng_state(), model.config._attn_implementation
    count_activations(model.base_model, blocks_of(model), (2, 8), torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(t, before[n]) and t.dtype == before[n].dtype for n, t in model.state_dict().items())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_full_checkpointing_keeps_the_entries() -> None:
    model = causal_lm("llama", num_hidden_layers=4)
    ids = torch.randint(3, 90, (4, 24))
    found = count_activations(model.base_model, blocks_of(model), (4, 24), None)
    recompute_blocks(blocks_of(model), "full", Switch(True), lambda _: None)
    entries = found.blocks * found.entry
    assert kept_bytes(model, ids) == pytest.approx(found.outside + entries, rel=0.02)
    assert found.entries == entries + found.outside
    assert found.kept("full", Selection()) < found.kept("none", Selection())


def test_selective_checkpointing_keeps_what_there_is_room_for() -> None:
    model = causal_lm("llama", num_hidden_layers=4)
    ids = torch.randint(3, 90, (4, 24))
    found = count_activations(model.base_model, blocks_of(model), (4, 24), None)
    bindings = recompute_blocks(blocks_of(model), "selective", Switch(True), lambda _: None)
    plain = step_of(model, ids)
    room, seen = found.blocks * found.block, []
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        selection = found.selection(round(share * room))
        for position, binding in enumerate(bindings):
            binding.select(selection, position, found.tokens)
        promised = found.kept("selective", selection)
        assert selection.kept(found.tokens) <= share * room
        seen.append((selection.describe(found.tokens), promised))
        assert kept_bytes(model, ids, cached=True) == pytest.approx(promised, rel=0.05), seen
        assert all(torch.equal(a, b) for a, b in zip(step_of(model, ids), plain, strict=True))
    assert [p for _, p in seen] == sorted(p for _, p in seen)
    assert seen[0][0] == "nothing" and seen[-1][0] == "everything"
    # twice the tokens: each keeps less of its own
    half = found.selection(room // 2)
    assert half.kept(2 * found.tokens) <= room // 2 and half.describe(found.tokens) != half.describe(2 * found.tokens)


def test_adapters_keep_less() -> None:
    model = causal_lm("llama")
    whole = count_activations(model.base_model, blocks_of(model), (2, 16), None)
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(False)
    frozen = count_activations(model.base_model, blocks_of(model), (2, 16), None)
    assert frozen.kept("none", Selection()) == 0 < whole.kept("none", Selection())


# -- the plan --------------------------------------------------------------------------------------------------------


def plan(capacity: float, **changes: Any) -> MemoryPlan:
    """A 7B model on 8 ranks, 16k tokens each."""
    n = 7_600_000_000
    state = State(
        parameters=n * 4 // 8,
        gradients=n * 4 // 8,
        optimizer=n * 8 // 8,
        root=2 * GIB,
        block=GIB // 2,
        blocks=14 * GIB,
        root_gradients=2 * GIB,
        reduced=4 * GIB,
        ranks=8,
    )
    products = tuple(Product(i, GIB // 4, 4096) for i in range(5))
    activations = Activations(28, 2 * GIB, GIB // 8, GIB // 8, products, GIB, GIB // 2, tokens=16384)
    return replace(MemoryPlan(state, activations, 3 * GIB, 16384, int(capacity * GIB)), **changes)


def test_the_peak_is_that_of_the_worst_moment() -> None:
    found = plan(141)
    kept = UNCOUNTED + found.state.parameters + found.state.optimizer
    gathered = 2 * GIB + 2 * (GIB // 2) + 9 * GIB // 16  # two blocks, and one's buffer with this rank's part of it
    assert found.moments()["forward ends"] == kept + gathered + 57 * GIB + 3 * GIB
    assert found.moments()["backward begins"] == kept + gathered + 57 * GIB + GIB // 2
    assert found.moments()["backward ends"] == kept + found.state.gradients + 6 * GIB
    assert found.peak == found.moments()["forward ends"]
    assert found.fits and found.remedies() == []
    assert "expected peak, when forward ends" in found.render()
    earlier = replace(found, frees_gradients=False)
    assert earlier.peak - found.peak == found.state.gradients
    whole = replace(found, accumulates=True, state=replace(found.state, accumulated=28 * GIB))
    assert whole.peak - found.peak == 28 * GIB


def test_selective_fills_what_there_is() -> None:
    for capacity in (50, 60, 70):
        found = replace(plan(capacity), checkpointing="selective")
        assert found.fits and found.peak > 0.9 * capacity * GIB, (capacity, found.render())
        assert f"of each block is kept: {found.selection.describe(16384)}" in found.render()
    assert "everything" in replace(plan(200), checkpointing="selective").render()


def test_remedies_fit_and_name_switches() -> None:
    found = plan(60)
    assert not found.fits
    texts = found.remedies()
    assert "activation_checkpointing='selective'" in texts and "activation_checkpointing='full'" in texts
    assert any("tokens per rank" in text for text in texts)
    assert all(text in found.render() for text in texts)
    selective = replace(found, checkpointing="selective")
    assert selective.fits and selective.remedies() == []
    small = plan(18)
    assert any(" with " in text for text in small.remedies()), small.remedies()
    assert "smaller model" in plan(0.1).remedies()[0]


def test_offload_moves_state_to_the_host() -> None:
    found = plan(141)
    moved = replace(found, state=replace(found.state, offload=True))
    assert moved.host == found.state.parameters + found.state.gradients + found.state.optimizer
    assert found.peak - moved.peak == found.state.parameters + found.state.optimizer


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
        (lambda p: torch.optim.SGD(p, lr=1), 0),
        (lambda p: torch.optim.SGD(p, lr=1, momentum=0.9), 1),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3),
        (lambda p: torch.optim.Adagrad(p), 1),
        (lambda p: torch.optim.NAdam(p), 2),
        (lambda p: torch.optim.RAdam(p), 2),
        (lambda p: torch.optim.Adadelta(p), 2),
        (lambda p: torch.optim.Adamax(p), 2),
        (lambda p: torch.optim.Rprop(p), 2),
        (lambda p: torch.optim.ASGD(p), 1),
    ],
)
def test_optimizer_state(make: Any, expected: int) -> None:
    parameters = [torch.nn.Parameter(torch.randn(1000)), torch.nn.Parameter(torch.randn(50, 4))]
    optimizer = make(parameters)
    found, _, unknown = optimizer_bytes([optimizer])
    assert (found, unknown) == (expected * 4 * 1200, [])
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    real = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    assert real == pytest.approx(found, rel=0.02, abs=64)


def test_unknown_optimizers_are_assumed_to_keep_two() -> None:
    class Mine(torch.optim.SGD):
        pass

    assert state_factor(Mine([torch.nn.Parameter(torch.zeros(1))])) == (2.0, False)


def test_reading_batches() -> None:
    made = modules.collate(modules.rows(4))
    found = read_batch(made)
    assert found.shape == tuple(made["input_ids"].shape)
    assert found.tokens == int(made["attention_mask"].sum()) and found.labelled == 4 * modules.LABELS
    assert read_batch(tuple(made.values())).tokens == made["input_ids"].numel()
    assert read_batch(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5)
    assert read_batch({"pixels": torch.zeros(2, 3, 8, 8)}).tokens == 0


@pytest.mark.parametrize("make", [modules.InInit, modules.IsTheModel, modules.Adapters, modules.PolicyAndReference])
def test_a_plan_is_made_before_training(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    callback = LigerCallback()
    trainer = L.Trainer(strategy=LigerFSDPStrategy(bf16=False), callbacks=[callback], **{**QUIET, "max_steps": 1})
    module = make()
    trainer.fit(module, modules.loader())
    made = callback.report.to_dict()["memory_plan"]
    numel = sum(p.numel() for p in module.parameters())
    assert made["parameters"] == 4 * numel
    assert made["gradients"] == 4 * sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert made["fits"] and made["tokens"] > 0 and made["activations"] > 0
    assert made["keeps_blocks"] == made["activations_counted"] == (make is not modules.IsTheModel)
    assert "memory plan" in capsys.readouterr().out


def test_bound_kernels_are_counted_as_what_they_keep() -> None:
    model = causal_lm("llama")
    plain = count_activations(model.base_model, blocks_of(model), (1, 64), torch.bfloat16)
    for block in blocks_of(model):
        spec = GatedSpec("silu", "gate_proj", "up_proj", "down_proj")
        GatedMLPBinding(block.mlp, Switch(True), spec, OpReport("swiglu", ""), {}).bind()
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            RMSNormBinding(norm, Switch(True), None, OpReport("rms_norm", ""), {}).bind()
    bound = count_activations(model.base_model, blocks_of(model), (1, 64), torch.bfloat16)
    # silu(gate), of the intermediate width 48, and the fp32 copy of each norm's input, of width 32
    assert bound.counted and plain.block - bound.block == 64 * (48 * 2 + 2 * 32 * 4)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("activation_checkpointing", "some"),
        ("reshard_after_forward", "maybe"),
        ("weights", ""),
        ("prefetch", -1),
        ("prefetch", True),
        ("gather_in_evaluation", "never"),
    ],
)
def test_options_that_do_not_exist(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}: expected"):
        LigerFSDPStrategy(**{option: value})


def test_selective_checkpointing_by_what_a_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "FRACTION_USABLE", 1.0)

    def run(capacity: int) -> tuple[dict[str, Any], list[Tensor]]:
        monkeypatch.setattr(planning, "capacity_of", lambda _: capacity)
        callback, module = LigerCallback(verbose=False), modules.InInit("llama")
        trainer = L.Trainer(
            strategy=LigerFSDPStrategy(bf16=False, activation_checkpointing="selective"),
            callbacks=[callback],
            **{**QUIET, "max_steps": 2},
        )
        trainer.fit(module, modules.loader())
        return callback.report.to_dict()["memory_plan"], [p.detach().clone() for p in module.parameters()]

    least, most = run(0), run(2**40)
    half = run((least[0]["peak"] + most[0]["peak"]) // 2)
    assert (least[0]["kept"], most[0]["kept"]) == ("nothing", "everything")
    assert half[0]["fits"] and "product" in half[0]["kept"], half[0]
    assert least[0]["peak"] < half[0]["peak"] < most[0]["peak"]
    for other in (most, half):
        assert all(torch.equal(a, b) for a, b in zip(least[1], other[1], strict=True))


def test_half_the_state_leaves_room_for_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device where fp32 state leaves room for nothing, bf16 state leaves four bytes a parameter."""
    monkeypatch.setattr(memory_plan, "FRACTION_USABLE", 1.0)

    class WithAdamW(modules.InInit):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), foreach=False)

    def plan(capacity: int, **options: Any) -> dict[str, Any]:
        monkeypatch.setattr(planning, "capacity_of", lambda _: capacity)
        callback = LigerCallback(verbose=False)
        strategy = LigerFSDPStrategy(bf16=False, activation_checkpointing="selective", **options)
        trainer = L.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, callbacks=[callback], max_steps=1, logger=False,
            enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip
        module = WithAdamW("llama")
        trainer.fit(module, modules.loader())
        sizes.append(sum(p.numel() for p in module.parameters()))
        return callback.report.to_dict()["memory_plan"]

    sizes: list[int] = []
    least = plan(0)
    fp32, bf16 = plan(least["peak"]), plan(least["peak"], optimizer_state_dtype="bf16")
    assert (fp32["optimizer"], bf16["optimizer"]) == (8 * sizes[0], 4 * sizes[0])
    assert fp32["kept"] == "nothing" != bf16["kept"] and bf16["fits"], bf16
    steps = [one["moments"]["optimizer steps"] - one["temporaries"] for one in (fp32, bf16)]
    assert steps[0] - steps[1] == 4 * sizes[0]
