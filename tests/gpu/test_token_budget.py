"""``max_tokens_per_batch="auto"`` on a device: the budget fits, uses the memory, and is the largest; and what is said
when a budget does not fit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback
from lightning_liger.data.out_of_memory import BatchTooLarge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# of an H200 about 16 GB: a large device would be filled with seconds of work otherwise
ALLOWED = 16e9


@pytest.fixture(autouse=True)
def a_small_device() -> Iterator[None]:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, ALLOWED / total))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, Qwen2Config

        shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 8, "vocab_size": 32_000}
        heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(Qwen2Config(**shape, **heads), dtype=torch.bfloat16).train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def _lengths(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(32, 1024, (count,), generator=generator).tolist()


def _collate(samples: list[Tensor]) -> dict[str, Tensor]:
    longest = max(map(len, samples))
    ids = torch.stack([torch.nn.functional.pad(s, (0, longest - len(s))) for s in samples])
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _train(budget: Any, steps: int = 8) -> LigerCallback:
    rows: Any = [torch.randint(1, 32_000, (n,)) for n in _lengths(4_000)]
    callback = LigerCallback(verbose=False, max_tokens_per_batch=budget)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-true",
        max_steps=steps,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(rows, batch_size=8, shuffle=True, collate_fn=_collate))
    return callback


def test_the_largest_budget_that_fits() -> None:
    start = time.perf_counter()
    callback = _train("auto")
    budget = callback.report.to_dict()["token_batches"]["budget"]
    torch.cuda.empty_cache()
    used = torch.cuda.max_memory_allocated() / ALLOWED
    print(f"budget {budget:,}; peak {used:.0%} of what is allowed; {time.perf_counter() - start:.0f} s")
    print(callback.report.render())
    assert 0.6 < used <= 0.97
    with pytest.raises(BatchTooLarge, match=r"samples with [\d,]+ tokens .*Try max_tokens_per_batch="):
        _train(2 * budget)
