"""Ten architectures through ``Trainer.fit`` with Liger's kernels, against the plain run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Plain, Run, assert_same, collate, difference, documents, fit, relative_all
from models import ARCHITECTURES, tiny
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback

# per decoder layer, and outside of the layers
EXPECTED: dict[str, dict[str, tuple[int, int]]] = {
    "llama": {"rms_norm": (2, 1), "swiglu": (1, 0), "rope": (1, 0)},
    "qwen3": {"rms_norm": (4, 1), "swiglu": (1, 0), "rope": (1, 0)},
    "gemma": {"rms_norm": (2, 1), "geglu": (1, 0), "rope": (1, 0)},
    "gemma2": {"rms_norm": (4, 1), "geglu": (1, 0), "rope": (1, 0)},
    "olmo2": {"rms_norm": (4, 1), "swiglu": (1, 0), "rope": (1, 0)},
}
LAYERS = 2


def short_documents() -> DataLoader[Any]:
    """The interpreter runs one row at a time."""
    return DataLoader(documents(4, longest=7), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]


def train(kind: str, callback: LigerCallback | None, dtype: torch.dtype = torch.float32, **options: Any) -> Run:
    return fit(Plain(tiny(kind, dtype), lr=0.05), short_documents(), callback, max_steps=2, **options)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_same_loss_and_gradients_in_fp32(kind: str) -> None:
    plain = train(kind, None)
    callback = LigerCallback(kernels=True, padding_free=False, fused_head=False, verbose=False)
    ours = train(kind, callback)
    assert_same(plain, ours, loss=1e-5, gradient=1e-5, parameter=1e-5)
    ops = ours.report["kernels"]["ops"]
    for op, (per_layer, outside) in EXPECTED.get(kind, EXPECTED["llama"]).items():
        expected = per_layer * LAYERS + outside
        assert ops[op]["applied"] == ops[op]["found"] == expected, (op, ops)
        assert ops[op]["calls"] == 2 * expected, (op, ops)
        assert not ops[op]["original_calls"] and not ops[op]["refused"], ops
    assert sum(op["applied"] for op in ops.values()) == ours.report["kernels"]["applied"]


@pytest.mark.parametrize("kind", ("qwen2", "gemma2", "phi3", "mixtral"))
def test_same_loss_with_padding_removed_and_fused_head(kind: str) -> None:
    plain = train(kind, None)
    ours = train(kind, LigerCallback(kernels=True, verbose=False))
    assert_same(plain, ours, loss=1e-5, gradient=2e-5, parameter=1e-5)
    assert ours.report["padding_free"]["packed_calls"] == 2
    assert all(op["calls"] for op in ours.report["kernels"]["ops"].values() if op["applied"])


def _bf16_error(kind: str, kernels: bool) -> tuple[float, float]:
    """Loss and gradient error of bf16-true against fp32 on the same (bf16-rounded) weights, in the first step."""
    exact = tiny(kind, torch.bfloat16).float()
    reference = fit(Plain(exact, lr=0.05), short_documents(), max_steps=1)
    callback = LigerCallback(kernels=True, padding_free=False, fused_head=False, verbose=False) if kernels else None
    run = fit(Plain(tiny(kind), lr=0.05), short_documents(), callback, max_steps=1, precision="bf16-true")
    if kernels:
        ops = run.report["kernels"]["ops"].values()
        assert all(op["calls"] and not op["original_calls"] for op in ops if op["applied"]), run.report
    return abs(run.losses[0] - reference.losses[0]), relative_all(run.gradients[0], reference.gradients[0])


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_bf16_is_no_worse_than_plain_bf16(kind: str) -> None:
    plain, ours = _bf16_error(kind, False), _bf16_error(kind, True)
    # single losses and gradients scatter by the rounding of a few numbers; worse would be a multiple
    assert ours[0] <= 1.5 * plain[0] + 2e-3, (plain, ours)
    assert ours[1] <= 1.25 * plain[1] + 1e-3, (plain, ours)


@pytest.mark.parametrize("kind", ("llama", "qwen3", "gemma2", "mixtral"))
def test_bf16_mixed(kind: str) -> None:
    """Autocast decides the dtype of every result; a kernel must give the dtype that the original gave."""
    plain = train(kind, None, precision="bf16-mixed")
    callback = LigerCallback(kernels=True, padding_free=False, fused_head=False, verbose=False)
    ours = train(kind, callback, precision="bf16-mixed")
    found = difference(plain, ours)
    assert found.loss < 2e-3 and found.gradient < 3e-2, found
    ops = ours.report["kernels"]["ops"]
    assert all(op["calls"] and not op["original_calls"] for op in ops.values() if op["applied"]), ops
