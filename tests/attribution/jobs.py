"""Jobs for tests: build functions that other processes import."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 320
LENGTHS = [5, 23, 11, 17, 8, 29, 14, 20]


class Ordinary(L.LightningModule):
    """Takes its batch apart, as many do; its own loss; knows nothing of being measured."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
        self.model = LlamaForCausalLM(config).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        logits = self.model(**batch).logits
        self.look(logits)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def look(self, logits: Tensor) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class PlainDoesNotFit(Ordinary):
    """As if the logits of a plain run did not fit into memory, and a packed run killed its process."""

    def look(self, logits: Tensor) -> None:
        if type(logits) is Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        forward = self.model.model.__dict__.get("forward")
        if type(forward).__name__ == "PackedBackbone":
            os._exit(3)


def collate(samples: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(s)] for s in samples])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def loader(batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(1, VOCAB, (n,), generator=generator) for n in LENGTHS]
    return DataLoader(samples, batch_size=batch_size, collate_fn=collate)  # type: ignore[arg-type]


def ordinary() -> Any:
    return Ordinary(), loader(), {"accelerator": "cpu", "accumulate_grad_batches": 2, "max_epochs": 3}


def plain_does_not_fit() -> Any:
    return PlainDoesNotFit(), loader(), {"accelerator": "cpu"}


def no_module() -> Any:
    return torch.nn.Linear(2, 2), loader()
