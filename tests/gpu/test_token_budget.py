"""``max_tokens_per_batch="auto"`` on a device: the budget fits through a training, uses the memory, and is about the
largest; and what is said when a budget does not fit.

    python -m pytest -m gpu tests/gpu/test_token_budget.py -s
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback
from lightning_liger.data.out_of_memory import BatchTooLarge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# of an H200 about 16 GB: a large device would be filled with seconds of work otherwise
ALLOWED = 16e9
VOCAB = 32_000
SHAPES = {
    "small": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 8, "num_attention_heads": 14},
    # weights, gradients and Adam's moments take half of the memory
    "large": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 14, "num_attention_heads": 16},
}


@pytest.fixture(autouse=True)
def a_small_device() -> Iterator[None]:
    total = torch.cuda.mem_get_info()[1]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, ALLOWED / total))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


class Module(L.LightningModule):
    def __init__(self, shape: str) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, Qwen2Config

        torch.manual_seed(0)
        config = Qwen2Config(**SHAPES[shape], vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=True)
        self.model = AutoModelForCausalLM.from_config(config).train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def uniform(count: int) -> Any:
    return np.random.default_rng(0).integers(32, 1024, count)


def heavy_tail(count: int) -> Any:
    """And one document of 16,384 tokens."""
    lengths = np.clip(np.random.default_rng(1).lognormal(np.log(966) - 0.5, 1.0, count).astype(int), 8, 4096)
    return np.append(lengths, 16_384)


def short(count: int) -> Any:
    """Thousands of documents in a batch."""
    return np.random.default_rng(2).integers(2, 24, 30 * count)


def _collate(samples: list[Tensor]) -> dict[str, Tensor]:
    longest = max(map(len, samples))
    ids = torch.stack([torch.nn.functional.pad(s, (0, longest - len(s))) for s in samples])
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@dataclass(frozen=True)
class Case:
    lengths: Any
    shape: str = "small"
    precision: str = "bf16-true"
    accumulate: int = 1

    def __str__(self) -> str:
        return f"{self.lengths.__name__}, {self.shape}, {self.precision}, accumulating {self.accumulate}"


def _train(case: Case, budget: Any, steps: int) -> LigerCallback:
    generator = torch.Generator().manual_seed(0)
    rows: Any = [torch.randint(1, VOCAB, (int(n),), generator=generator) for n in case.lengths(6_000)]
    callback = LigerCallback(verbose=False, max_tokens_per_batch=budget)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision=case.precision,  # type: ignore[arg-type]
        max_steps=steps,
        accumulate_grad_batches=case.accumulate,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(case.shape), DataLoader(rows, batch_size=8, shuffle=True, collate_fn=_collate))
    return callback


CASES = [
    Case(uniform),
    Case(uniform, precision="bf16-mixed", accumulate=2),
    Case(heavy_tail),
    Case(short),
    # no single long document: its activations alone would not fit beside that model
    Case(uniform, shape="large", accumulate=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_largest_budget_that_fits(case: Case) -> None:
    start = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    callback = _train(case, "auto", steps=30)  # long enough for fragments
    found = callback.report.to_dict()["token_batches"]
    budget = found["budget"]
    allocated = torch.cuda.max_memory_allocated() / ALLOWED
    reserved = torch.cuda.max_memory_reserved() / ALLOWED
    stats = torch.cuda.memory_stats()
    print(
        f"\n{case}: {found['found']}; peak {allocated:.0%} allocated, {reserved:.0%} reserved, "
        f"{stats['num_alloc_retries']} retries, {time.perf_counter() - start:.0f} s"
    )
    assert 0.6 < allocated <= 0.97
    torch.cuda.empty_cache()
    if case is CASES[0]:
        with pytest.raises(BatchTooLarge, match=r"samples with [\d,]+ tokens .*Try max_tokens_per_batch="):
            _train(case, 2 * budget, steps=8)
