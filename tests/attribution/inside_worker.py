"""Two processes, run by ``torchrun``: trainings with and without ``benchmark_steps`` are the same bit by bit."""

from __future__ import annotations

import os
import warnings
from typing import Any

import jobs
import lightning as L
import torch
import torch.distributed as dist
from helpers import leave

from lightning_liger import LigerCallback, LigerFSDPStrategy

KEPT: list[Any] = []  # trainers and their process groups: gloo now and then aborts a process in which one is collected


def trained(strategy: Any, **options: Any) -> tuple[list[torch.Tensor], LigerCallback]:
    L.seed_everything(5, verbose=False)
    module = jobs.Ordinary()
    callback = LigerCallback(verify="off", verbose=False, **options)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=3,
        accumulate_grad_batches=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    KEPT.append(trainer)
    trainer.fit(module, jobs.loader(batch_size=2))
    return [p.detach().clone() for p in module.parameters()], callback


def main() -> None:
    warnings.simplefilter("ignore")
    for name, strategy in (("ddp", lambda: "ddp"), ("liger_fsdp", lambda: LigerFSDPStrategy(bf16=False))):
        one, _ = trained(strategy())
        two, callback = trained(strategy(), benchmark_steps=2)
        same = [
            torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b))
            for a, b in zip(one, two, strict=True)
        ]
        assert all(same), name
        found = callback.report.attribution
        assert found["problems"] == [], found["problems"]
        names = [v["name"] for v in found["variants"]]
        assert names == ["plain", "+fused head", "+padding-free"], names
        dist.barrier()
        if int(os.environ["RANK"]) == 0:
            print(f"{name}: the same", flush=True)
    leave()


if __name__ == "__main__":
    main()
