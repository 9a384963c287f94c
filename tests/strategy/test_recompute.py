"""Blocks that are computed again in backward give the losses and gradients of blocks that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from helpers import causal_lm, collate, documents
from torch import Tensor

from lightning_liger import accelerate
from lightning_liger.parallel.recompute import recompute_blocks
from lightning_liger.patching import Switch

KINDS = ("qwen2", "llama", "gpt2", "gemma2")


def blocks_of(model: Any) -> list[nn.Module]:
    return list(model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers)


def batch() -> dict[str, Tensor]:
    return collate(documents(4, seed=3))


def step(model: Any, **kwargs: Any) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(**batch(), **kwargs).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(a: tuple[float, dict[str, Tensor]], b: tuple[float, dict[str, Tensor]]) -> bool:
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


def saved_bytes(model: Any) -> int:
    """Distinct storages that autograd keeps for backward, without the parameters."""
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hidden = model.base_model(batch()["input_ids"], use_cache=False).last_hidden_state
    del hidden
    return sum(kept.values())


class Counter:
    def __init__(self, model: Any) -> None:
        self.calls = 0
        for block in blocks_of(model):
            for inner in block.modules():
                if type(inner).__name__.endswith(("Attention",)):
                    inner.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_loss_and_gradients_with_dropout(kind: str, mode: str) -> None:
    changes = {"attention_dropout": 0.1}
    if kind == "gpt2":
        changes = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    model = causal_lm(kind, **changes)
    plain = step(model)
    keys = list(model.state_dict())
    notes: list[str] = []
    switch = Switch(True)
    made = recompute_blocks(blocks_of(model), mode, switch, notes.append)
    assert len(made) == 2 and recompute_blocks(blocks_of(model), mode, switch, notes.append) == []
    counter = Counter(model)
    assert same(step(model), plain)
    assert counter.calls == 4
    assert list(model.state_dict()) == keys
    assert all("KV cache" in n for n in notes), notes  # use_cache is on by default
    model.eval()  # what from_pretrained returns trains too
    counter.calls = 0
    step(model)
    assert counter.calls == 4
    for binding in made:
        binding.unbind()
    assert all("forward" not in vars(b) for b in blocks_of(model))


def test_less_is_kept() -> None:
    model = causal_lm("llama", num_hidden_layers=4)
    plain = saved_bytes(model)
    kept = {}
    for mode in ("selective", "full"):
        switch = Switch(True)
        recompute_blocks(blocks_of(model), mode, switch, lambda _: None)
        kept[mode] = saved_bytes(model)
        switch.on = False
    assert kept["full"] < plain / 4, (plain, kept)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("first", ["theirs", "ours"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_never_twice_beside_transformers_own(kind: str, first: str, reentrant: bool) -> None:
    model = causal_lm(kind)
    plain = step(model)
    notes: list[str] = []
    enable = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    if first == "theirs":
        model.gradient_checkpointing_enable(**enable)
    recompute_blocks(blocks_of(model), "full", Switch(True), notes.append)
    if first == "ours":
        model.gradient_checkpointing_enable(**enable)
    counter = Counter(model)
    assert same(step(model), plain)
    assert counter.calls == 4
    assert any("stays in charge" in n for n in notes)


@pytest.mark.parametrize("first", ["packing", "recomputing"])
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_calls(kind: str, mode: str, first: str) -> None:
    model = causal_lm(kind)
    reference = accelerate(model)
    plain = step(model)
    if first == "recomputing":
        reference.revert()
    recompute_blocks(blocks_of(model), mode, Switch(True), lambda _: None)
    handle = reference if first == "packing" else accelerate(model)
    before = handle.report.padding.packed_calls
    assert same(step(model), plain)
    assert handle.report.padding.packed_calls == before + 1
    handle.revert()
    assert handle.report.padding.padded_runs == 0


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_through_a_cache(kind: str, mode: str) -> None:
    model = causal_lm(kind)
    ids = batch()["input_ids"]

    def run() -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        cache = model(ids[:, :8], use_cache=True).past_key_values
        loss = model(ids[:, 8:], past_key_values=cache).logits.square().mean()
        loss.backward()
        assert cache.get_seq_length() == ids.shape[1]
        return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}

    plain = run()
    notes: list[str] = []
    recompute_blocks(blocks_of(model), mode, Switch(True), notes.append)
    counter = Counter(model)
    assert same(run(), plain)
    assert counter.calls == 8 and ["KV cache" in n for n in set(notes)] == [True]


def test_a_cache_that_is_written_in_place_is_left_alone() -> None:
    from transformers import StaticCache

    model = causal_lm("llama")
    notes: list[str] = []
    recompute_blocks(blocks_of(model), "full", Switch(True), notes.append)
    counter = Counter(model)
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(batch()["input_ids"], past_key_values=cache)
    assert counter.calls == 2
    assert any("second run would write again" in n for n in notes)


class Own(nn.Module):
    """A block of nobody's library that writes into the result of a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = self.a(self.norm(x))
        y = torch.nn.functional.dropout(torch.relu(y), 0.5)
        return x + self.b(y).mul_(scale)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_blocks_of_nobodys_library(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Own(), Own()])

    def run() -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(3)
        model.zero_grad()
        x = torch.randn(4, 8)
        for block in model:
            x = block(x, scale=0.5)
        loss = x.square().mean()
        loss.backward()
        return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}

    plain = run()
    recompute_blocks(model, mode, Switch(True), lambda _: None)
    assert same(run(), plain)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_compiled_blocks_hold_the_checkpoint_in_one_graph(mode: str) -> None:
    model = causal_lm("llama")
    plain = step(model, use_cache=False)
    switch = Switch(True)
    recompute_blocks(blocks_of(model), mode, switch, lambda _: None)
    for block in blocks_of(model):
        block.compile(backend="aot_eager", fullgraph=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert same(step(model, use_cache=False), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    torch._dynamo.reset()


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="activation_checkpointing='some': expected one of 'none'"):
        recompute_blocks([], "some", Switch(True), lambda _: None)
