"""Wherever the model comes from: made early, late, in a hook, being the LightningModule itself, or plain torch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from helpers import VOCAB, Plain, assert_engaged, assert_same, both, collate_shifted, config, loader


class InInit(Plain):
    def __init__(self) -> None:
        super().__init__(transformers.AutoModelForCausalLM.from_config(config()))


class InSetup(Plain):
    def setup(self, stage: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_config(config())


class InConfigureModel(Plain):
    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = transformers.AutoModelForCausalLM.from_config(config())


class InTrainStart(Plain):
    """Grows the vocabulary in a hook, when everything has been wrapped already."""

    def __init__(self) -> None:
        super().__init__(transformers.AutoModelForCausalLM.from_config(config(tie_word_embeddings=False)))

    def on_fit_start(self) -> None:
        self.model.resize_token_embeddings(VOCAB + 7, mean_resizing=False)
        self.trainer.optimizers = [self.configure_optimizers()]


class ViaForward(Plain):
    def __init__(self) -> None:
        super().__init__(transformers.AutoModelForCausalLM.from_config(config()))

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        return self.model(input_ids, attention_mask, labels=labels)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(**batch).loss


class IsTheModel(transformers.Qwen2ForCausalLM, L.LightningModule):
    def __init__(self) -> None:
        super().__init__(config())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.2)


@pytest.mark.parametrize("made", [InInit, InSetup, InConfigureModel, InTrainStart, ViaForward, IsTheModel])
def test_where_the_model_is_made(made: Any) -> None:
    plain, ours = both(made, loader)
    assert_same(plain, ours)
    assert_engaged(ours)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(self.norm2(x))


class NanoGPT(L.LightningModule):
    """A model of one's own in plain torch: returns ``(logits, loss)``, takes no mask."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(32, 4) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(32), nn.Linear(32, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, loss = self(batch["input_ids"], batch["targets"])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.2)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_plain_torch(tied: bool) -> None:
    plain, ours = both(lambda: NanoGPT(tied), lambda: loader(collate_shifted))
    assert_same(plain, ours)
    assert_engaged(ours)
