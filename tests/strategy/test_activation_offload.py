"""Activations that wait in host memory come back as they were, in time, and only the latest are on the device.

A stand-in for the copies makes the CPU's memory a device's: what is away is kept where tensors are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Plain, assert_same, causal_lm, collate, documents, fit, loader, relative_all
from live_memory import Live
from torch import Tensor

from lightning_liger import LigerCallback, LigerFSDPStrategy, accelerate
from lightning_liger.parallel import offloading
from lightning_liger.parallel.activations import Activations
from lightning_liger.parallel.memory_plan import MemoryPlan, State
from lightning_liger.parallel.offloading import ActivationOffload, Lane
from lightning_liger.parallel.recompute import recompute_blocks
from lightning_liger.patching import Switch


class Elsewhere(Lane):
    """Copies at once, into memory that is not a tensor's, and writes down what it does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.log: list[str] = []

    def to_host(self, flat: Tensor) -> tuple[Any, Any]:
        self.log.append(f"out {flat.numel()}")
        return np.copy(flat.numpy()), None

    def to_device(self, host: Any) -> tuple[Tensor, Any]:
        self.log.append(f"back {host.size}")
        return torch.empty(host.size, dtype=torch.uint8).copy_(torch.from_numpy(host)), None

    def wait(self, event: Any) -> None:
        pass


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Elsewhere]]:
    made: list[Elsewhere] = []

    def lane_for(device: torch.device) -> Elsewhere:
        made.append(Elsewhere(device))
        return made[-1]

    monkeypatch.setattr(offloading, "lane_for", lane_for)
    monkeypatch.setattr(offloading, "LEAST_BYTES", 64)
    yield made


def blocks_of(model: Any) -> list[Any]:
    return list(model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers)


def step(model: Any, backwards: int = 1) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(**collate(documents(4, seed=3))).loss
    for i in range(backwards):
        loss.backward(retain_graph=i + 1 < backwards)
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_the_same_training(kind: str, checkpointing: Any, lanes: list[Elsewhere]) -> None:
    depth = {"n_layer": 4} if kind == "gpt2" else {"num_hidden_layers": 4}
    plain = fit(Plain(causal_lm(kind, **depth)), loader())
    strategy = LigerFSDPStrategy(bf16=False, activation_checkpointing=checkpointing, activation_offload=True)
    module = Plain(causal_lm(kind, **depth))
    callback = LigerCallback(verbose=False)
    ours = fit(module, loader(), callback, strategy=strategy)
    plain.gradients = ours.gradients = []  # those of shards
    assert_same(plain, ours)
    (lane,) = lanes
    assert sum(line.startswith("out") for line in lane.log) >= 3 * 4  # three of four blocks, in four steps
    assert sum(line.startswith("back") for line in lane.log) >= 2 * 4  # what is still there is not fetched
    assert not any(b._forward_hooks or b._forward_pre_hooks for b in blocks_of(module.model))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_gradients_are_equal_and_graphs_can_be_kept(checkpointing: str, lanes: list[Elsewhere]) -> None:
    for backwards in (1, 2):
        model = causal_lm("llama", num_hidden_layers=4)
        plain = step(model, backwards)
        recompute_blocks(blocks_of(model), checkpointing, Switch(True), lambda _: None)
        accelerate(model)
        reference = step(model, backwards)
        offload = ActivationOffload(blocks_of(model), offloading.lane_for(torch.device("cpu")), lambda _: None)  # type: ignore[arg-type]
        found = step(model, backwards)
        assert found[0] == reference[0] and all(torch.equal(found[1][n], reference[1][n]) for n in found[1])
        assert relative_all(found[1], plain[1]) <= 1e-6
        assert offload.bytes > 0
        offload.close()


def test_one_block_ahead(lanes: list[Elsewhere]) -> None:
    model = causal_lm("llama", num_hidden_layers=6).base_model
    blocks = list(model.layers)
    recompute_blocks(blocks, "full", Switch(True), lambda _: None)
    lane = Elsewhere(torch.device("cpu"))
    ActivationOffload(blocks, lane, lambda _: None)
    for i, block in enumerate(blocks):
        block.self_attn.register_forward_hook(lambda *_, i=i: lane.log.append(f"block {i}"))
    model(
        **{k: v for k, v in collate(documents(4, seed=3)).items() if k != "labels"}
    ).last_hidden_state.sum().backward()
    kinds = [line.split()[0] if "block" not in line else line for line in lane.log]
    forward = [part for i in range(6) for part in (["out"] if i < 5 else []) + [f"block {i}"]]
    assert kinds[: len(forward)] == forward
    # 5 was never moved and 4 had not left; 3 comes while 4 is computed again, and so on
    assert kinds[len(forward) :] == [
        "block 5", "back", "block 4", "back", "block 3", "back", "block 2", "back", "block 1", "block 0",
    ]  # fmt: skip


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_few_blocks_are_on_the_device(checkpointing: str, lanes: list[Elsewhere]) -> None:
    ids = torch.randint(3, 97, (1, 512))
    peaks = []
    for offloaded in (False, True):
        model = causal_lm("llama", num_hidden_layers=12, max_position_embeddings=512).base_model
        recompute_blocks(list(model.layers), checkpointing, Switch(True), lambda _: None)
        model.requires_grad_(False)  # gradients of weights would grow while activations go
        model.embed_tokens.requires_grad_()
        if offloaded:
            ActivationOffload(list(model.layers), Elsewhere(torch.device("cpu")), lambda _: None)
        with Live() as live:
            output = model(ids, use_cache=False).last_hidden_state
            kept = live.bytes
            output.sum().backward()
        peaks.append((kept, live.peak))
    entry = 512 * 32 * 4
    assert peaks[0][0] - peaks[1][0] >= 8 * entry, (peaks, entry)
    assert peaks[0][1] - peaks[1][1] >= 8 * entry, (peaks, entry)


def test_what_all_blocks_share_stays(lanes: list[Elsewhere]) -> None:
    """Angles of rotary embeddings, and weights, are there anyway."""
    model = causal_lm("llama", num_hidden_layers=3, hidden_size=64, num_attention_heads=2)
    lane = Elsewhere(torch.device("cpu"))
    ActivationOffload(blocks_of(model), lane, lambda _: None)
    angles: set[int] = set()
    model.model.layers[0].register_forward_pre_hook(
        lambda m, a, k: angles.update(t.untyped_storage().nbytes() for t in k["position_embeddings"]), with_kwargs=True
    )
    step(model)
    sizes = {int(line.split()[1]) for line in lane.log}
    assert angles and not sizes & angles
    assert not sizes & {p.nbytes for p in blocks_of(model)[0].mlp.parameters()}


def test_beside_transformers_own_checkpoints(lanes: list[Elsewhere]) -> None:
    model = causal_lm("llama", num_hidden_layers=3)
    plain = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    notes: list[str] = []
    lane = Elsewhere(torch.device("cpu"))
    ActivationOffload(blocks_of(model), lane, notes.append)
    found = step(model)
    assert all(torch.equal(found[1][n], plain[1][n]) for n in plain[1])
    # as transformers has it, its checkpoint is inside of the block's call (5.24) or around it (5.17)
    moved = [line for line in lane.log if line.startswith("out")]
    assert len(moved) == 2 or "own gradient checkpointing" in notes[0]


def test_the_cpu_says_that_it_has_no_effect() -> None:
    callback = LigerCallback(verbose=False)
    fit(Plain(causal_lm()), loader(), callback, strategy=LigerFSDPStrategy(bf16=False, activation_offload=True))
    assert offloading.NO_EFFECT in callback.report.notes


def test_small_activations_are_said_to_stay(lanes: list[Elsewhere], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "LEAST_BYTES", 2**30)
    callback = LigerCallback(verbose=False)
    fit(Plain(causal_lm()), loader(), callback, strategy=LigerFSDPStrategy(bf16=False, activation_offload=True))
    assert not lanes[0].log and any("moved nothing" in n for n in callback.report.notes)


def test_a_bad_value_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"activation_offload='yes': expected True or False\."):
        LigerFSDPStrategy(activation_offload="yes")  # type: ignore[arg-type]


def test_the_plan_knows() -> None:
    activations = Activations(blocks=28, block=1000, entry=100, outside=10)
    state = State(0, 0, 0, 0, 0, 0, 0, 0)
    plan = MemoryPlan(state, activations, 0, 16, 2**30 + 2000, checkpointing="full", offloads=False)
    offloaded = MemoryPlan(state, activations, 0, 16, 2**30, checkpointing="full", offloads=True)
    assert plan.moments()["forward ends"] - offloaded.moments()["forward ends"] == 25 * 100
    assert (plan.host, offloaded.host) == (0, 2500)
    assert ("activations in host memory", 2500) in offloaded.rows()
    tight = MemoryPlan(
        state, activations, 0, 16, round((plan.peak - 1000) / 0.95), checkpointing="full", offloads=False
    )
    assert "activation_offload=True" in tight.remedies()
    assert "activation_offload" not in "".join(
        MemoryPlan(state, activations, 0, 16, 2**20, checkpointing="full").remedies()
    )
