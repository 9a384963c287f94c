"""Kernels on decoders that run without their padding."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import VOCAB, relative_all
from models import gradients

from lightning_liger import Settings, accelerate

sys.path.insert(0, str(Path(__file__).parents[2] / "padding"))
from decoder_models import Llama, NanoGPT

EXPECTED = {
    "passed": {"rms_norm": 5, "swiglu": 2},
    "learned": {"layer_norm": 5},
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_kernels_see_rows(kind: str) -> None:
    torch.manual_seed(0)
    model = Llama("passed") if kind == "passed" else NanoGPT()
    plain = copy.deepcopy(model)
    handle = accelerate(model, Settings(kernels=True))
    ids = torch.randint(3, VOCAB, (3, 12))
    labels = ids.roll(-1, 1)
    for row, length in enumerate((12, 5, 8)):
        ids[row, length:], labels[row, length - 1 :] = 0, -100
    losses = []
    for m in (model, plain):
        loss = F.cross_entropy(m(ids).flatten(0, 1), labels.flatten()) if kind == "passed" else m(ids, labels)[1]
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert relative_all(gradients(model), gradients(plain)) < 1e-5
    assert handle.report.padding.packed_calls == handle.report.padding.calls == 1
    ops = handle.report.kernels.ops
    for op, count in EXPECTED[kind].items():
        assert ops[op].applied == count, ops
        # the head and what stands outside of blocks takes part as well
        assert ops[op].calls >= count and not ops[op].original_calls, ops[op]
    handle.revert()
    assert not any("forward" in vars(m) for m in model.modules())
