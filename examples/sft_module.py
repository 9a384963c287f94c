"""An ordinary LightningModule and DataModule for supervised fine-tuning. They know of no plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from sft_data import DataError, encode, pad, read_pairs

Batch = dict[str, Tensor]


def pretrained_arguments(path: str | Path) -> dict[str, Any]:
    """What `from_pretrained` wants for a checkpoint directory, or for one GGUF file."""
    path = Path(path)
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(path)}


class SFTModule(L.LightningModule):
    def __init__(self, model: str, lr: float = 3e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(**pretrained_arguments(model), dtype=torch.float32)
        self.model.train()  # from_pretrained returns a model in eval mode

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self.model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=batch["labels"],
        )
        self.log("train_loss", output.loss, prog_bar=True)
        return output.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.01)


class SFTDataModule(L.LightningDataModule):
    def __init__(self, data: str, tokenizer: str, batch_size: int = 16, max_length: int = 512, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            **pretrained_arguments(self.hparams["tokenizer"])
        )
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        pairs = read_pairs(self.hparams["data"], self.tokenizer)
        self.examples = list(encode(pairs, self.tokenizer, self.hparams["max_length"]))
        if not self.examples:
            raise DataError(
                f"{self.hparams['data']}: no row leaves room for an answer within {self.hparams['max_length']} tokens; "
                "allow more of them (--max-length)"
            )

    def collate(self, examples: list[dict[str, list[int]]]) -> Batch:
        return pad(examples, self.tokenizer.pad_token_id or 0)

    def train_dataloader(self) -> DataLoader[dict[str, list[int]]]:
        return DataLoader(
            self.examples,  # type: ignore[arg-type]
            batch_size=self.hparams["batch_size"],
            shuffle=True,
            collate_fn=self.collate,
            generator=torch.Generator().manual_seed(self.hparams["seed"]),
        )
