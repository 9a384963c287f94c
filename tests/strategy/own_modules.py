"""LightningModules without any library of models."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import VOCAB
from torch import Tensor


def sgd(parameters: Any) -> torch.optim.Optimizer:
    # not Adam: it divides tiny gradients by themselves, and their rounding with them
    return torch.optim.SGD(list(parameters), 0.2, momentum=0.9)


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class IsTheModel(L.LightningModule):
    """No library: the LightningModule holds embedding, blocks and head, and takes floating inputs, too."""

    def __init__(self, blocks: int = 3, manual: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(VOCAB, 32)
            self.features = nn.Linear(2, 32)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.head = nn.Linear(32, VOCAB)
        self.automatic_optimization = not manual

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        x = self.embed(ids) + self.features(features)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any) -> Any:
        ids = batch["input_ids"]
        features = torch.stack([ids / 10, batch["attention_mask"].float()], -1)
        loss = F.cross_entropy(self(ids, features)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


class OneLinear(L.LightningModule):
    """Nothing is repeated, nothing but a method of a submodule is called, and the backward is the user's own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            logits = self.model(batch["input_ids"])
            loss = self.loss(logits, batch["labels"])
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss.detach()}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


class Routed(nn.Module):
    """Experts in a list, chosen by the batch: ranks use different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            taken = chosen == i
            if taken.any():
                out[taken] = expert(self.norm(x[taken]))
        return x + out


class ChoosesExperts(IsTheModel):
    """Each row goes to one expert by its length; a spare layer and a spare block are never used."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.blocks = nn.ModuleList(Routed() for _ in range(3))
            self.spare = nn.Linear(3, 3)

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        x = self.embed(ids) + self.features(features)
        lengths = features[..., 1].sum(-1).long()
        for i, block in enumerate(self.blocks[:2]):
            x = block(x, (lengths + i) % 3)
        return self.head(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.2)
