"""Decoders in plain PyTorch on a CUDA device: batches that Lightning moves, kernels for packed documents, no waiting."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "padding"))
import decoder_models as models
from helpers import VOCAB, assert_same, both, collate_shifted, difference, loader
from test_decoders import Trains, assert_packed, loss_inside, loss_outside

from lightning_liger import accelerate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KINDS: dict[str, tuple[Any, Any]] = {
    "learned": (models.NanoGPT, loss_inside),
    "checkpointed": (lambda: models.NanoGPT(reentrant=True), loss_inside),
    "passed": (lambda: models.Llama("passed"), loss_outside),
    "inside": (lambda: models.Llama("inside", reentrant=False), loss_outside),
    "residual": (models.Residual, loss_outside),
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fit(kind: str, precision: str) -> None:
    make, step = KINDS[kind]
    plain, ours = both(
        lambda: Trains(make, step), lambda: loader(collate_shifted), accelerator="gpu", precision=precision
    )
    assert_packed(ours)
    if precision == "32-true":
        assert_same(plain, ours, loss=1e-4, gradient=1e-3, parameter=1e-4)  # TF32 may round by shape
    else:
        found = difference(plain, ours)
        assert found.loss < 1e-2 and found.gradient < 0.1, found


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (3, 60), generator=generator)
    labels = ids.roll(-1, 1)
    for row, length in enumerate((60, 17, 41)):
        ids[row, length:], labels[row, length - 1 :] = 0, -100
    return ids, labels


@pytest.mark.parametrize("kind", ["learned", "passed", "inside", "residual"])
def test_nothing_waits_for_the_device(kind: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = KINDS[kind][0]().cuda()
    handle = accelerate(model)

    def step(seed: int, *, strict: bool) -> None:
        on_cpu = batch(seed)
        on_gpu = tuple(t.cuda() for t in on_cpu)
        handle.book.pair(on_cpu, on_gpu)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            if kind == "learned":
                loss = model(*on_gpu)[1]
            else:
                found = model(on_gpu[0])
                logits = found["logits"] if isinstance(found, dict) else found
                loss = F.cross_entropy(logits.flatten(0, 1), on_gpu[1].flatten())
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for seed in range(4):
        step(seed, strict=seed >= 2)
    padding = handle.report.padding
    assert padding.packed_calls == padding.calls == 4, padding.off
    assert handle.book.device_reads == 0
