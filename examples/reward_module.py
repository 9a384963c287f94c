"""A reward model as a LightningModule. It knows of no plugin."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from sft_module import Batch, pretrained_arguments


class RewardModule(L.LightningModule):
    """Bradley-Terry: the better answer of a pair gets the higher reward (Ouyang et al., arXiv:2203.02155, equation 1).

    Args:
        model: checkpoint directory or name of a causal language model; its head becomes one number per text.
        lr: learning rate of AdamW.
    """

    def __init__(self, model: str, lr: float = 1e-5) -> None:
        super().__init__()
        self.save_hyperparameters()
        load = AutoModelForSequenceClassification.from_pretrained
        self.model = load(**pretrained_arguments(model), num_labels=1, dtype=torch.float32).train()
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = 0

    def rewards(self, batch: Batch, prefix: str) -> Tensor:
        """``(B,)``"""
        output = self.model(
            input_ids=batch[f"{prefix}input_ids"], attention_mask=batch[f"{prefix}attention_mask"], use_cache=False
        )
        return output.logits.squeeze(-1).float()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        difference = self.rewards(batch, "chosen_") - self.rewards(batch, "rejected_")
        loss = -F.logsigmoid(difference).mean()
        self.log_dict({"loss": loss, "accuracy": (difference > 0).float().mean()}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.01)
