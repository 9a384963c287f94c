"""Batches lengthened with filler on a CUDA device: the same losses and gradients on real kernels, few shapes, no waiting.

python -m pytest -m gpu tests/gpu/test_shape_buckets.py -s
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import relative_all
from test_cuda import _model
from test_no_waiting import forbidden_to_wait
from torch import Tensor

from lightning_liger import Settings, accelerate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def batches(count: int, rows: int = 6) -> list[dict[str, Tensor]]:
    """On the CPU, pinned: with lengths that no two batches share."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        lengths = torch.randint(20, 400, (rows,), generator=generator)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.randint(1, 4096, mask.shape, generator=generator) * mask
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        made.append({k: v.pin_memory() for k, v in batch.items()})
    return made


def step(model: Any, handle: Any, batch: dict[str, Tensor]) -> Tensor:
    moved = {k: v.to("cuda", non_blocking=True) for k, v in batch.items()}
    handle.book.pair(batch, moved)
    loss: Tensor = model(**moved).loss
    loss.backward()
    return loss.detach()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["auto", "sdpa", "flex"])
@pytest.mark.parametrize("kind", ["qwen2", "llama128", "mistral", "gemma2"])
def test_as_without(kind: str, attention: str) -> None:
    exact = _model(kind, torch.float32)
    models = {choice: copy.deepcopy(exact).bfloat16() for choice in (False, True)}
    handles = {c: accelerate(m, Settings(shape_buckets=c, attention=attention)) for c, m in models.items()}
    whole = accelerate(exact, Settings(shape_buckets=False, attention="sdpa"))
    for batch in batches(4):
        expected = step(exact, whole, batch)
        found = {choice: step(models[choice], handles[choice], batch) for choice in models}
        assert abs(found[True] - found[False]) <= 2e-3 * expected
    errors = {choice: relative_all(gradients(m), gradients(exact)) for choice, m in models.items()}
    report = handles[True].report.padding
    print(f"\n{kind}, {attention}: off by {errors[True]:.1e} with filler, {errors[False]:.1e} without; {report.shapes}")
    assert report.packed_calls == 4 and report.filler > 0
    assert errors[True] <= 1.2 * errors[False] + 1e-3


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_layers_compiled_once_never_wait(kind: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = _model(kind, torch.bfloat16)
    for layer in model.model.layers:  # type: ignore[union-attr, operator]
        layer.compile(dynamic=False)
    handle = accelerate(model, Settings(shape_buckets=[3072]))
    given = batches(12)
    for batch in given:
        step(model, handle, batch)
    graphs = counters["stats"]["unique_graphs"]
    with forbidden_to_wait():
        for batch in batches(24)[12:]:
            step(model, handle, batch)
    report = handle.report.padding
    print(f"\n{kind}: {graphs} graphs, {report.shapes}, {report.filler_fraction:.1%} filler")
    assert counters["stats"]["unique_graphs"] == graphs
    assert len(report.shapes) == 1
