"""A GPT written from nothing in PyTorch, and its training as a LightningModule. Neither knows of a plugin."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from sft_module import Batch, pretrained_arguments


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Token ids ``(B, S)`` to logits ``(B, S, V)``. No attention mask: padding is behind the text."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPTModule(L.LightningModule):
    """Next-token prediction with a loss written by hand.

    Args:
        tokenizer: checkpoint directory or name, for the size of the vocabulary.
        width: of the hidden states.
        layers: blocks.
        heads: of each block.
        max_length: longest row in tokens.
        lr: learning rate of AdamW.
    """

    def __init__(
        self, tokenizer: str, width: int = 128, layers: int = 2, heads: int = 4, max_length: int = 512, lr: float = 3e-4
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        vocabulary = len(AutoTokenizer.from_pretrained(**pretrained_arguments(tokenizer)))
        self.gpt = GPT(vocabulary, width, layers, heads, max_length)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.gpt(batch["input_ids"])
        targets = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], betas=(0.9, 0.95), weight_decay=0.1)
