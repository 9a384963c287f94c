"""Blocks on compiled code and as CUDA graphs, on a CUDA device: the same training, whatever they run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback
from lightning_liger.tuning import candidates
from lightning_liger.tuning.decision import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def _no_earlier_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    torch._dynamo.reset()


class Module(L.LightningModule):
    def __init__(self, checkpointing: bool = False, **changes: Any) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, Qwen2Config

        shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
        torch.manual_seed(0)
        config = Qwen2Config(vocab_size=4096, num_hidden_layers=4, use_cache=False, **shape, **changes)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _batches(count: int) -> list[dict[str, Tensor]]:
    made = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(20, 200, (12,), generator=generator)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.randint(1, 64, mask.shape, generator=generator) * mask  # learnt in a few steps
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return made


def _fit(callback: LigerCallback | None, module: Module, precision: str = "bf16-true", **options: Any) -> list[float]:
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_steps=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if callback is None else [callback],
        **options,
    )
    trainer.fit(module, DataLoader(_batches(16), batch_size=None))
    return [float(x) for x in module.losses]


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("choice", [True, "cudagraphs"])
def test_the_same_losses(choice: Any, precision: str) -> None:
    plain = _fit(None, Module(), precision)
    callback = LigerCallback(compile=choice, kernels=False, verbose=False)
    found = _fit(callback, Module(), precision)
    assert found == pytest.approx(plain, abs=5e-2)
    assert found[-1] < found[0] - 0.5
    report = callback.report.blocks
    assert (report.applied, report.off) == (4, [])


def test_with_accumulation_and_checkpointing() -> None:
    plain = _fit(None, Module(True), accumulate_grad_batches=2)
    callback = LigerCallback(compile=True, kernels=False, verbose=False)
    assert _fit(callback, Module(True), accumulate_grad_batches=2) == pytest.approx(plain, abs=5e-2)
    assert (callback.report.blocks.applied, callback.report.blocks.off) == (4, [])
    plain = _fit(None, Module(), accumulate_grad_batches=2)
    callback = LigerCallback(compile="cudagraphs", kernels=False, verbose=False)
    assert _fit(callback, Module(), accumulate_grad_batches=2) == pytest.approx(plain, abs=5e-2)
    assert (callback.report.blocks.applied, callback.report.blocks.off) == (4, [])


@pytest.mark.parametrize("plan", [None, Plan(), Plan(("swiglu",)), Plan((), True, True)])
def test_auto_times_and_trains(plan: Plan | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if plan is not None:
        monkeypatch.setattr(candidates, "fastest", lambda *given: plan)
    plain = _fit(None, Module())
    callback = LigerCallback(verbose=False)
    assert _fit(callback, Module()) == pytest.approx(plain, abs=5e-2)
    print(callback.report.blocks.decided)
    assert callback.report.blocks.off == []
    assert "timed in" in callback.report.blocks.decided
    for name in ("as they are ", "as they are + CUDA graphs ", "kernels (", "compiled ", "compiled + CUDA graphs "):
        assert name in callback.report.blocks.decided
