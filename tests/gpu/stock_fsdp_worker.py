"""Run by ``torchrun`` on two GPUs: Lightning's own ``FSDPStrategy`` (FSDP1) with the callback and without it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from helpers import Recorder, Run, leave
from lightning.pytorch.strategies import FSDPStrategy

from lightning_liger import LigerCallback

sys.path.append(str(Path(__file__).parent.parent / "strategy"))
import modules
from runs import QUIET


def fit(kind: Any, *callbacks: Any, **options: Any) -> Run:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    run = Run()
    strategy = FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer})
    trainer = L.Trainer(
        accelerator="gpu", devices=2, strategy=strategy, callbacks=[Recorder(run), *callbacks], **{**QUIET, **options}
    )
    rank = trainer.global_rank
    trainer.fit(kind("llama"), modules.loader(rank, 2), modules.loader(rank, 2))
    run.metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return run


def compare(kind: Any) -> None:
    plain, callback = fit(kind), LigerCallback(verbose=False)
    ours, report = fit(kind, callback), callback.report.to_dict()
    for a, b in zip(plain.losses, ours.losses, strict=True):
        assert abs(a - b) <= 2e-5 * a, (plain.losses, ours.losses)
    assert len(set(plain.losses)) > 1
    assert abs(plain.metrics["val_loss"] - ours.metrics["val_loss"]) <= 2e-5 * plain.metrics["val_loss"]
    assert report["padding_free"]["packed_calls"] > 0, report["padding_free"]
    assert report["fused_head"]["fused_calls"] == 0 and any("FSDP1" in note for note in report["notes"]), report
    if dist.get_rank() == 0:
        print(f"ok {kind.__name__}", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = False
    compare(modules.InInit)
    compare(modules.OwnLoss)
    try:
        fit(modules.InInit, LigerCallback(verbose=False), gradient_clip_val=0.5)
    except ValueError as error:
        assert "strategy='liger_fsdp'" in str(error)
        if dist.get_rank() == 0:
            print("ok clipping by norm is refused", flush=True)


if __name__ == "__main__":
    main()
    leave()
