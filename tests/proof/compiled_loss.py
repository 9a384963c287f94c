"""A step with a compiled function; in a file of its own, because such a function counts for all that stands beside it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers import Plain
from torch import Tensor


@torch.compile(backend="eager")
def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


class CompiledLoss(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return loss_of(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
