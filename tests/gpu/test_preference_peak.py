"""DPO, CPO and GRPO at the size of a 7B model's head: no tensor of the size of the logits is ever allocated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "head"))

from preference_losses import Loss, cpo, dpo, grpo

from lightning_liger.head.lazy import Head, LazyRows
from lightning_liger.head.readings import Habits
from lightning_liger.report import HeadReport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCH, LENGTH, WIDTH, VOCAB = 4, 2048, 3584, 152_064
LOGITS = BATCH * LENGTH * VOCAB * 4  # bytes, in the fp32 that plain code computes log-probabilities in


def _head(trained: bool, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.02
    return hidden.requires_grad_(trained), weight.requires_grad_(trained)


# Readers share their products from the second step on. In the first, each hands over a dW of its own: GRPO, which also
# reads the entropy, holds two at a time, and a KL over the vocabulary three, so that there dW says more than logits do.
@pytest.mark.parametrize(("loss", "share"), [(dpo, 0.25), (cpo, 0.25), (grpo, 0.5)], ids=["dpo", "cpo", "grpo"])
def test_peak(loss: Loss, share: float) -> None:
    (hidden, weight), (other_hidden, other_weight) = _head(True, 0), _head(False, 1)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), device="cuda")
    labels = ids.masked_fill(torch.arange(LENGTH, device="cuda") < LENGTH // 4, -100)
    report, habits = HeadReport("head"), (Habits(), Habits())
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        policy = LazyRows.logits(hidden, Head(weight, None, torch.bfloat16, "triton", report, habits=habits[0]))
        with torch.no_grad():
            other = Head(other_weight, None, torch.bfloat16, "triton", report, habits=habits[1])
            reference = LazyRows.logits(other_hidden, other)
        value = loss(policy, reference, ids, labels)
        value.backward()
        torch.cuda.synchronize()
        # the weight's gradient is summed in fp32 and handed over in bf16: part of every run, logits or no logits
        gradient = weight.numel() * (4 + 2)
        extra = torch.cuda.max_memory_allocated() - before - gradient
        print(f"{loss.__name__}: {extra / 2**30:.2f} GiB beside dW; one (B, S, V) tensor is {LOGITS / 2**30:.2f} GiB")
        assert value.isfinite() and weight.grad is not None and bool(weight.grad.any())
        assert extra < share * LOGITS
    assert report.materialised_by == {}
