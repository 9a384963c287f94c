"""A model and batches for modules of both Lightning trees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB, ROWS = 96, 12


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Qwen2ForCausalLM(config).train()


def sample(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(1, VOCAB, (4 + 5 * (index % 4),), generator=generator)


def collate(samples: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loader(batch_size: int) -> DataLoader[Any]:
    return DataLoader([sample(i) for i in range(ROWS)], batch_size=batch_size, collate_fn=collate)  # type: ignore[arg-type]
