"""Blocks on compiled code and replayed as recordings compute what plain blocks compute, with one graph for all layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_recorder import EmulatedRecorder
from helpers import causal_lm, collate, documents
from torch import Tensor

from lightning_liger import Settings, accelerate
from lightning_liger.accelerate import Accelerated
from lightning_liger.compilation.apply import compiled, stack_of
from lightning_liger.compilation.block import Graphs
from lightning_liger.compilation.recorded import CannotRecord, RecordedBlock, RecordedStack
from lightning_liger.proof.requested import BLOCKS, judge, requests


class CountingBackend:
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(module, inputs)


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _accelerated(model: Any, **settings: Any) -> Accelerated:
    return accelerate(model, Settings(kernels=False, shape_buckets=True, **settings))


def _compile(model: Any, accelerated: Accelerated, said: list[str]) -> CountingBackend:
    backend = CountingBackend()
    graphs = Graphs(backend, said.append)
    for binding in compiled(stack_of(model.base_model), model.base_model, accelerated._switch, graphs):
        accelerated._keep(binding)
    return backend


def _train(model: Any, steps: int = 4) -> tuple[list[float], list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(steps):
        loss = model(**collate(documents(4, seed=step))).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()]


def _assert_equal(found: tuple[list[float], list[Tensor]], plain: tuple[list[float], list[Tensor]]) -> None:
    assert found[0] == pytest.approx(plain[0], rel=1e-5)
    for a, b in zip(found[1], plain[1], strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max().clamp_min(1e-3))


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_one_graph_serves_all_layers_and_batches(kind: str) -> None:
    plain = _train(causal_lm(kind))
    model, said = causal_lm(kind), []  # type: ignore[var-annotated]
    accelerated = _accelerated(model)
    backend = _compile(model, accelerated, said)
    found = _train(model)
    _assert_equal(found, plain)
    assert (backend.graphs, said) == (1, [])
    accelerated.revert()
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_activation_checkpointing(reentrant: bool) -> None:
    plain = _train(causal_lm())
    model, said = causal_lm(), []  # type: ignore[var-annotated]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    backend = _compile(model, _accelerated(model), said)
    _assert_equal(_train(model), plain)
    assert (backend.graphs, said) == (1, [])


def test_a_block_that_cannot_be_compiled_runs_as_it_is_and_says_why() -> None:
    plain = _train(causal_lm("gemma2"))
    model, said = causal_lm("gemma2"), []  # type: ignore[var-annotated]
    backend = _compile(model, _accelerated(model), said)
    _assert_equal(_train(model), plain)
    assert backend.graphs == 0
    assert len(said) == 1
    assert said[0].startswith("Gemma2DecoderLayer is not compiled: its attention")


def _train_on_sums(model: Any, steps: list[list[tuple[int, int]]]) -> list[float]:
    """The losses of steps, each the sum over batches that are given as (rows, seed)."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for batches in steps:
        loss = sum(model(**collate(documents(rows, seed=seed))).loss for rows, seed in batches)
        loss.backward()  # type: ignore[union-attr]
        losses.append(float(loss.detach()))  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _record(model: Any, accelerated: Accelerated, said: list[str]) -> RecordedStack:
    blocks = stack_of(model.base_model)
    stack = RecordedStack(blocks, 2, said.append, EmulatedRecorder())
    stack.seen_before = 2
    for block in blocks:
        accelerated._keep(RecordedBlock(block, accelerated._switch, stack))
    return stack


def test_recorded_blocks_train_like_plain_ones() -> None:
    plain = _train(causal_lm(num_hidden_layers=3), 6)
    model, said = causal_lm(num_hidden_layers=3), []  # type: ignore[var-annotated]
    accelerated = _accelerated(model)
    _compile(model, accelerated, said)
    stack = _record(model, accelerated, said)
    _assert_equal(_train(model, 6), plain)
    assert said == []
    assert stack.recorder.recorded == 6  # type: ignore[attr-defined]
    (shape,) = stack._shapes.values()
    assert [made.forward.replays for made in shape.made] == [4, 4, 4]


def test_a_second_forward_before_the_backward_is_not_replayed() -> None:
    def train(model: Any) -> list[float]:
        return _train_on_sums(model, [[(4, step), (4, step + 17)] for step in range(6)])

    plain = train(causal_lm())
    model, said = causal_lm(), []  # type: ignore[var-annotated]
    accelerated = _accelerated(model)
    _compile(model, accelerated, said)
    stack = _record(model, accelerated, said)
    assert train(model) == pytest.approx(plain, rel=1e-5)
    (shape,) = stack._shapes.values()
    assert [made.forward.replays for made in shape.made] == [5, 5]


def test_attention_that_reads_documents_on_the_cpu_is_not_recorded() -> None:
    plain = _train(causal_lm())
    model, said = causal_lm(), []  # type: ignore[var-annotated]
    accelerated = _accelerated(model)
    _record(model, accelerated, said)
    _assert_equal(_train(model), plain)
    assert len(said) == 1
    assert "(sdpa) does not read the boundaries" in said[0]


def test_a_recording_that_ends_half_way_leaves_right_gradients() -> None:
    class FailsAtThird(EmulatedRecorder):
        def record(self, function: Any) -> Any:
            if self.recorded == 2:
                raise CannotRecord("of a test")
            return super().record(function)

    plain = _train(causal_lm(num_hidden_layers=3), 5)
    model, said = causal_lm(num_hidden_layers=3), []  # type: ignore[var-annotated]
    accelerated = _accelerated(model)
    _compile(model, accelerated, said)
    stack = _record(model, accelerated, said)
    stack.recorder = FailsAtThird()
    _assert_equal(_train(model, 5), plain)
    assert said == ["CUDA graphs: not recorded: of a test"]


def test_nothing_is_recorded_over_the_activations_of_another_shape() -> None:
    def train(model: Any) -> list[float]:
        # from the fourth step on a second shape runs between forward and backward of the first
        return _train_on_sums(model, [[(4, step)] if step < 4 else [(4, step), (9, step + 17)] for step in range(9)])

    plain = train(causal_lm())
    model, said = causal_lm(), []  # type: ignore[var-annotated]
    accelerated = _accelerated(model)
    _compile(model, accelerated, said)
    stack = _record(model, accelerated, said)
    assert train(model) == pytest.approx(plain, rel=1e-5)
    first, second = stack._shapes.values()
    assert (len(first.made), len(second.made)) == (2, 0)


def test_gradients_outlive_the_next_replay() -> None:
    def train(model: Any) -> list[Tensor]:
        kept = []
        for step in range(8):
            model(**collate(documents(4, seed=step))).loss.backward()
            if step % 2:  # two batches add up
                kept += [p.grad.clone() for p in model.parameters()]
                model.zero_grad()
        for step in range(4):
            loss = model(**collate(documents(4, seed=step))).loss
            kept += torch.autograd.grad(loss, list(model.parameters()))
        return kept

    plain = train(causal_lm())
    model, said = causal_lm(), []  # type: ignore[var-annotated]
    accelerated = _accelerated(model)
    _compile(model, accelerated, said)
    stack = _record(model, accelerated, said)
    for found, expected in zip(train(model), plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    (shape,) = stack._shapes.values()
    assert [made.forward.replays for made in shape.made] == [10, 10]


def test_the_kernel_proof_names_what_replayed_blocks_ran() -> None:
    model, said = causal_lm(), []  # type: ignore[var-annotated]
    accelerated = _accelerated(model)
    _compile(model, accelerated, said)
    _record(model, accelerated, said)
    ways = []
    for _ in range(4):
        asked = requests(model, accelerated.bindings())
        _train(model, 1)
        findings = [f for f in judge(asked, accelerated.report, 0) if f.request.feature == BLOCKS]
        assert [f.ran for f in findings] == [True, True]
        ways.append({f.request.binding.way for f in findings})  # type: ignore[union-attr]
    assert ways == [{"compiled"}, {"compiled"}, {"compiled + CUDA graphs"}, {"compiled + CUDA graphs"}]
