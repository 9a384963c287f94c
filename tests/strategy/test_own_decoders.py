"""A decoder in plain PyTorch under the strategy: what its padding is left for is said, and it trains as it does alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import modules
import torch

from lightning_liger import LigerCallback, LigerFSDPStrategy

sys.path.append(str(Path(__file__).parent.parent / "padding"))


class Decodes(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        from decoder_models import NanoGPT

        torch.manual_seed(0)
        self.model = NanoGPT()

    def training_step(self, batch: Any) -> Any:
        targets = torch.cat([batch["labels"][:, 1:], torch.full_like(batch["labels"][:, :1], -100)], 1)
        return self.model(batch["input_ids"], targets)[1]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(strategy: Any, *callbacks: Any) -> dict[str, torch.Tensor]:
    module = Decodes()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=list(callbacks),
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, modules.loader())
    return {n: p.detach() for n, p in module.named_parameters()}


def test_its_padding_stays_and_the_report_says_why() -> None:
    callback = LigerCallback(verbose=False)
    plain, ours = fit("auto"), fit(LigerFSDPStrategy(bf16=False), callback)
    for name, parameter in plain.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=1e-7)
    assert "NanoGPT is sharded and no transformers model" in callback.report.render()
