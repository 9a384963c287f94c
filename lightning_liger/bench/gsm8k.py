"""Supervised fine-tuning on GSM8K, as far as speed goes: its lengths, random tokens, random weights, no download.

Shapes are those of Qwen2.5 (their ``config.json``). Questions are prompts, whose labels are ignored, as in any SFT.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_liger.bench.job import Build, Job
from lightning_liger.bench.task import Sample, Task

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "14b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
# 7.6 billion parameters with fp32 masters and Adam state take 122 GB before the first activation
PRECISION = {"tiny": "32-true", "0.5b": "bf16-mixed", "7b": "bf16-true"}
_BATCH_SIZE = {"tiny": 8, "0.5b": 32, "7b": 16}
_LEARNING_RATE = 1e-5


class RandomTokens(Dataset[Sample]):
    """``(tokens, length of the prompt)`` pairs with the lengths of GSM8K."""

    def __init__(self, vocabulary: int) -> None:
        text = (Path(__file__).parent / "gsm8k_lengths.txt").read_text(encoding="utf-8")
        self.lengths = [tuple(map(int, line.split())) for line in text.splitlines() if not line.startswith("#")]
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        question, answer = self.lengths[index]
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, self.vocabulary, (question + answer,), generator=generator), question


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    """Padded on the right; the loss is over answers."""
    ids = torch.nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    columns = torch.arange(ids.shape[1])
    mask = columns < torch.tensor([[len(tokens)] for tokens, _ in samples])
    answers = mask & (columns >= torch.tensor([[prompt] for _, prompt in samples]))
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~answers, -100)}


def build(size: str) -> Job:
    """The job of one size of Qwen2.5."""
    precision = PRECISION[size]
    task = Task(
        shape=SHAPES[size],
        model=functools.partial(qwen2, size),
        loader=functools.partial(_loader, size),
        collate=collate,
        precision=precision,
        learning_rate=_LEARNING_RATE,
    )
    return Job(module_class()(size), _loader(size, collate), {"precision": precision}, task=task)


def qwen2(size: str) -> Any:
    """``Qwen2ForCausalLM`` with random weights, on the default device, in the default dtype, in training mode."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SHAPES[size], max_position_embeddings=32768, use_cache=False)).train()


def _loader(size: str, collate_fn: Callable[[list[Sample]], Any]) -> DataLoader[Sample]:
    return DataLoader(
        RandomTokens(SHAPES[size]["vocab_size"]),
        batch_size=_BATCH_SIZE[size],
        shuffle=True,
        collate_fn=collate_fn,
        generator=torch.Generator().manual_seed(0),
    )


def gsm8k() -> list[tuple[str, Build]]:
    """All sizes; those of billions of parameters on a CUDA device only."""
    sizes = ["0.5b", "7b"] if torch.cuda.is_available() else ["tiny"]
    return [(size, functools.partial(build, size)) for size in sizes]


def module_class() -> Any:
    import lightning.pytorch

    class Module(lightning.pytorch.LightningModule):
        """An ordinary module: it passes labels and takes the loss."""

        def __init__(self, size: str) -> None:
            super().__init__()
            self.size = size

        def configure_model(self) -> None:
            if hasattr(self, "model"):
                return
            # billions of random numbers take minutes on a CPU
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                self.model = qwen2(self.size)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            fused = next(self.parameters()).is_cuda
            return torch.optim.AdamW(self.parameters(), lr=_LEARNING_RATE, fused=fused)

    return Module
