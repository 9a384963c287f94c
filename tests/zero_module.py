"""The module that is trained under DeepSpeed, on CPUs and on GPUs."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from helpers import causal_lm
from torch import Tensor


class Module(L.LightningModule):
    """A loss of its own, computed outside of the model's forward, and the accuracy of the same logits: both are ``seen``."""

    def __init__(self, kind: str = "qwen2") -> None:
        super().__init__()
        self.model = causal_lm(kind)
        self.seen: list[float] = []

    def _loss(self, batch: Any) -> Tensor:
        x = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = F.cross_entropy(x.reshape(-1, x.size(-1)), labels.reshape(-1))
        with torch.no_grad():
            accuracy = (x.argmax(-1) == labels)[labels != -100].float().mean()
        self.seen += [float(loss), float(accuracy)]
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
