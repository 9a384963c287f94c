"""Models of one's own: a head that has to be named, an inference branch, weights that another library holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import VOCAB, Plain, assert_engaged, assert_same, causal_lm, collate_shifted, fit, loader
from test_heads import NanoGPT
from torch import Tensor

from lightning_liger import LigerCallback, Settings, accelerate


class WithABranch(NanoGPT):
    """Without targets only the last position is projected, as nanoGPT does for sampling."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if targets is not None:
            return super().forward(ids, targets)
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(x[:, [-1], :]), None


class Sampling(Plain):
    """Samples in between, and takes the best token in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, loss = self.model(batch["input_ids"], batch["targets"])
        with torch.no_grad():
            after, _ = self.model(batch["input_ids"])
            probs = F.softmax(after[:, -1, :] / 0.8, dim=-1)
            top = torch.topk(probs, 5).values
            self.log("mass", top.sum(-1).mean())
            self.log("accuracy", (logits.argmax(-1) == batch["targets"])[batch["targets"] >= 0].float().mean())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, loss = self.model(batch["input_ids"], batch["targets"])
        self.log("val_loss", loss)
        self.log("val_top", (logits.topk(3).indices == batch["targets"][..., None]).any(-1).float().sum())


def data() -> Any:
    return loader(collate_shifted)


@pytest.mark.parametrize("tied", [True, False])
def test_an_inference_branch(tied: bool) -> None:
    runs = []
    for callback in (None, LigerCallback(verbose=False)):
        torch.manual_seed(0)
        runs.append(fit(Sampling(WithABranch(tied)), data(), callback, val=data(), limit_val_batches=2))
    plain, ours = runs
    assert_same(plain, ours)
    for name in ("mass", "accuracy", "val_loss", "val_top"):
        assert ours.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-5)
    assert_engaged(ours, packed=False)
    assert ours.report["fused_head"]["materialised_by"] == {}


class Unlikely(nn.Module):
    """Nothing says which layer is the head: the input is no table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(VOCAB, 16, bias=False)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.out = nn.ModuleDict({"tokens": nn.Linear(16, VOCAB), "scores": nn.Linear(16, 3)})

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.body(self.into(F.one_hot(ids, VOCAB).float()))
        loss: Tensor = F.cross_entropy(self.out["tokens"](x).flatten(0, 1), targets.flatten())
        return loss + self.out["scores"](x).square().mean()


class Named(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["input_ids"], batch["targets"])


def test_a_head_that_is_named() -> None:
    runs = []
    for callback in (None, LigerCallback(verbose=False), LigerCallback(verbose=False, head="model.out.tokens")):
        torch.manual_seed(0)
        runs.append(fit(Named(Unlikely()), data(), callback))
    plain, unnamed, named = runs
    assert_same(plain, named)
    assert_engaged(named, packed=False)
    assert unnamed.report["fused_head"]["fused_calls"] == 0
    with pytest.raises(ValueError, match=r"head='out\.tokens': the module has no such submodule"):
        fit(Named(Unlikely()), data(), LigerCallback(verbose=False, head="out.tokens"))


def test_a_weight_that_zero_3_gives_back() -> None:
    """Recognised on the weight; where the engine does not fetch it with the head, the head is left alone."""
    model = causal_lm("llama")
    batch = next(iter(loader()))
    expected = model(**batch).loss
    model.lm_head.weight.ds_id = 0
    handle = accelerate(model, Settings(padding_free=False))
    found = model(**batch).loss
    assert torch.equal(found, expected)
    assert handle.report.head.fused_calls == 0
    assert any("ZeRO stage 3" in reason and "leaf module" in reason for reason in handle.report.head.off)
    handle.revert()
