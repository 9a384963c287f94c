"""LoRA fine-tuning with PEFT as a LightningModule. It knows of no plugin."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from sft_module import SFTModule


class LoRAModule(SFTModule):
    """Trains adapters on all linear layers of the blocks; everything else is frozen.

    Args:
        model: checkpoint directory or name.
        rank: of the adapters.
        alpha: their scale is ``alpha / rank``.
        dropout: on what goes into the adapters.
        lr: learning rate of AdamW.
    """

    def __init__(self, model: str, rank: int = 16, alpha: int = 32, dropout: float = 0.0, lr: float = 2e-4) -> None:
        super().__init__(model, lr)
        self.save_hyperparameters()
        config = LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self.model = get_peft_model(self.model, config)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams["lr"], weight_decay=0.0)

    def save_adapter(self, directory: str | Path) -> None:
        """What ``PeftModel.from_pretrained`` loads."""
        self.model.save_pretrained(directory)
