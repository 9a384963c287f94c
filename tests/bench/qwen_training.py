"""What the training benchmarks share: Qwen2.5's shapes, an ordinary module, batches with lengths like GSM8K's, a clock."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_liger.bench.gsm8k import SHAPES

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def qwen(size: str, device: torch.device | str, dtype: torch.dtype | None = None, **changes: Any) -> Any:
    """Random weights, the same on every rank, made on ``device``: billions of numbers take minutes on a CPU."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    common = {"max_position_embeddings": 32768, "rope_theta": 1e6, "use_cache": False}
    config = Qwen2Config(**{**SHAPES[size], **common, **changes})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


class Finetune(L.LightningModule):
    """An ordinary module: it passes labels and takes the loss."""

    def __init__(self, size: str, device: str, dtype: torch.dtype | None = None, **adamw: Any) -> None:
        super().__init__()
        self.size, self.made_on, self.made_in, self.adamw = size, device, dtype, adamw
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = qwen(self.size, self.made_on, self.made_in)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, **self.adamw)


class Clock(L.Callback):
    """Wall time of each step, the device waited for at its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        wait()
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        wait()
        self.seconds.append(time.perf_counter() - self._start)


def wait() -> None:
    """For the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def batches(
    vocabulary: int, steps: int, *, sequences: int = 0, tokens: int = 0, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Padded batches of ``sequences`` rows, or of as many as fill ``tokens``, with the prompts' labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(steps):
        lengths = torch.empty(4096).log_normal_(5.2, 0.4, generator=generator).long().clamp(40, 700)
        lengths = lengths[: int((lengths.cumsum(0) <= tokens).sum()) if tokens else sequences]
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.randint(1, vocabulary, mask.shape, generator=generator) * mask
        labels = ids.masked_fill(mask == 0, -100)
        labels[torch.arange(mask.shape[1]) < (lengths * 0.45).long()[:, None]] = -100
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def parameters(size: str, *, embedding: bool = False) -> int:
    """How many there are; without the input embedding unless it is asked for, or tied."""
    s = SHAPES[size]
    h, f, layers, v = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"], s["vocab_size"]
    kv = h // s["num_attention_heads"] * s["num_key_value_heads"]
    inside = layers * (2 * h * h + 2 * h * kv + h + 2 * kv + 3 * h * f + 2 * h) + h + v * h
    return int(inside + (v * h if embedding and not s["tie_word_embeddings"] else 0))
