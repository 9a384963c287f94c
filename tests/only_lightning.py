"""A LightningModule and DataModule that import ``lightning`` and nothing of the other tree, or of ours."""

from __future__ import annotations

import lightning as L
import torch
from one_model import loader, make_model
from torch import Tensor
from torch.utils.data import DataLoader


class TinyModule(L.LightningModule):
    """Next-token prediction.

    Args:
        lr: learning rate of AdamW.
    """

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = make_model()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, batch_size=len(batch["input_ids"]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class TinyData(L.LightningDataModule):
    """Rows of 4 to 19 tokens.

    Args:
        batch_size: rows in a batch.
    """

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return loader(self.batch_size)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return loader(self.batch_size)
