"""Two GPUs, run by ``torchrun``: a LightningModule under Lightning's DeepSpeed strategy, with or without the callback.

``OUT`` receives, from rank 0, losses, metrics, whole weights, and the callback's report.
"""

from __future__ import annotations

import os
import sys

import deepspeed
import lightning as L
import torch
from helpers import loader
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from zero_module import Module

from lightning_liger import LigerCallback


class Trained(Module):
    """Its weights are there at the end, whole."""

    weights: list[Tensor]

    def on_train_end(self) -> None:
        parameters = list(self.model.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            self.weights = [p.detach().float().cpu().clone() for p in parameters]


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
        torch.save({"found": [*map(torch.tensor, module.seen), *module.weights], "report": report}, os.environ["OUT"])


if __name__ == "__main__":
    main()
