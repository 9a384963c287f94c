"""A decoder in plain PyTorch under the strategy, on one process; two are in ``decoder_cases.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import modules
import torch
from helpers import QUIET

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


def fit(strategy: Any, *callbacks: Any, kind: Any = Decodes) -> dict[str, torch.Tensor]:
    module = kind()
    trainer = L.Trainer(strategy=strategy, callbacks=list(callbacks), **{**QUIET, "max_steps": 3})
    trainer.fit(module, modules.loader())
    return {n: p.detach() for n, p in module.named_parameters()}


def test_its_padding_goes_and_it_trains_as_without() -> None:
    callback = LigerCallback(verbose=False)
    plain, ours = fit("auto"), fit(LigerFSDPStrategy(bf16=False), callback)
    for name, parameter in plain.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=1e-7)
    padding = callback.report.to_dict()["padding_free"]
    assert padding["packed_calls"] == padding["calls"] == 3, padding


def test_in_bf16_it_errs_as_with_its_padding() -> None:
    exact = fit("auto")

    def error(**options: Any) -> float:
        callback = LigerCallback(verbose=False, **options)
        found = fit(LigerFSDPStrategy(), callback)
        assert (callback.report.to_dict()["padding_free"]["packed_calls"] == 3) == (not options)
        return sum(float((found[n] - exact[n]).norm()) for n in exact)

    assert 0 < error() < 1.5 * error(padding_free=False)


def test_so_it_does_where_the_user_sharded_all_of_it() -> None:
    from torch.distributed.fsdp import fully_shard

    class Whole(Decodes):
        def configure_model(self) -> None:
            fully_shard(self.model)

    callback = LigerCallback(verbose=False)
    plain, ours = fit("auto"), fit(LigerFSDPStrategy(bf16=False), callback, kind=Whole)
    for name, parameter in plain.items():
        torch.testing.assert_close(ours[name].full_tensor(), parameter, rtol=1e-5, atol=1e-7)  # type: ignore[attr-defined]
    assert callback.report.to_dict()["padding_free"]["packed_calls"] == 3
