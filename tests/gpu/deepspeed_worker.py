"""Two GPUs, run by ``torchrun``: a LightningModule under Lightning's DeepSpeed strategy, with or without the callback.

``OUT`` receives, from rank 0, losses, metrics, whole weights, and the callback's report.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import deepspeed
import lightning as L
import torch
import torch.nn.functional as F
from helpers import causal_lm, loader
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

from lightning_liger import LigerCallback


class Trained(L.LightningModule):
    """A loss of its own, computed outside of the model's forward, and the accuracy of the same logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = causal_lm(kind)
        self.found: list[Tensor] = []

    def _loss(self, batch: Any) -> Tensor:
        x = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = F.cross_entropy(x.reshape(-1, x.size(-1)), labels.reshape(-1))
        with torch.no_grad():
            accuracy = (x.argmax(-1) == labels)[labels != -100].float().mean()
        self.found += [loss.detach().cpu(), accuracy.cpu()]
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)

    def on_train_end(self) -> None:
        parameters = list(self.model.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            self.found += [p.detach().float().cpu().clone() for p in parameters]


def main() -> None:
    stage, kind, accelerated = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "accelerated"
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": 4,
    }
    torch.manual_seed(0)
    module = Trained(kind)
    callback = LigerCallback(verbose=False)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=DeepSpeedStrategy(config=config),
        precision="32-true",
        callbacks=[callback] if accelerated else [],
        max_steps=3,
        accumulate_grad_batches=2,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), loader())
    if trainer.global_rank == 0:
        report = callback.report.to_dict() if accelerated else None
        torch.save({"found": module.found, "report": report}, os.environ["OUT"])


if __name__ == "__main__":
    main()
