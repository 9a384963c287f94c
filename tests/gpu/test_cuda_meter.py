"""The meter on a CUDA device: it waits for nothing, its clock is right, and it knows who waits for whom."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback
from lightning_liger.meter.meter import Meter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 32


class Module(L.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
        heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64, "vocab_size": 4096}
        config = transformers.LlamaConfig(**sizes, **heads, pad_token_id=0, use_cache=False)
        with torch.device("cuda"):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)


class Watch(L.Callback):
    """Wall time of the steps after the first few; the meter's hooks may not wait in between two readings."""

    def __init__(self, ours: LigerCallback, every: int) -> None:
        self.ours, self.every = ours, every
        self.began = self.seconds = 0.0

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        (meter,) = (h for h in self.ours._hooks if isinstance(h, Meter))
        for name in ("begin_batch", "before_backward", "after_backward", "before_optimizer_step", "end_batch"):
            setattr(meter, name, self._guarded(getattr(meter, name), trainer))

    def _guarded(self, hook: Any, trainer: Any) -> Any:
        def guarded(*args: Any) -> None:
            reads = (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % self.every == 0
            torch.cuda.set_sync_debug_mode("default" if reads else "error")
            try:
                hook(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return guarded

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == STEPS // 2:
            torch.cuda.synchronize()
            self.began = time.perf_counter()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        torch.cuda.synchronize()
        self.seconds = (time.perf_counter() - self.began) / (STEPS // 2)


def train(width: int, layers: int, rows: int, length: int) -> tuple[dict[str, float], Watch, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(length // 2, length + 1, (STEPS, rows), generator=generator)
    data = []
    for row in lengths:
        mask = (torch.arange(length) < row[:, None]).long()
        ids = torch.randint(1, 4096, mask.shape, generator=generator) * mask
        data.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    ours = LigerCallback(verbose=False, verify="off")
    watch = Watch(ours, STEPS // 2)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-true",
        max_steps=STEPS,
        log_every_n_steps=STEPS // 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch, ours],
    )
    trainer.fit(Module(width, layers), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    found = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return found, watch, ours.report.to_dict()


@pytest.mark.parametrize(("width", "layers", "rows", "length"), [(128, 12, 4, 128), (4096, 4, 32, 512)])
def test_a_training_on_a_gpu(width: int, layers: int, rows: int, length: int) -> None:
    """A step of many small kernels waits for Python, one of few large ones does not."""
    metrics, watch, report = train(width, layers, rows, length)
    names = ("data_wait", "forward", "backward", "optimizer", "other")
    shares = {n: metrics[f"liger/{n}_fraction"] for n in names}
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3) and all(s >= 0 for s in shares.values()), shares
    assert 0 < metrics["liger/mfu"] <= metrics["liger/hfu"] < 1
    assert metrics["liger/reserved_memory_gb"] >= metrics["liger/peak_memory_gb"] > 0
    assert metrics["liger/step_seconds"] == pytest.approx(watch.seconds, rel=0.1)
    small = width < 1024
    assert (metrics["liger/launch_bound_fraction"] > 0.5) == small, metrics
    if not small:
        assert metrics["liger/mfu"] > 0.2, metrics
    assert any("waits for Python" in note for note in report["notes"]) == small
