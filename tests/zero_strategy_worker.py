"""Two processes, run by ``torchrun``: Lightning's ``DeepSpeedStrategy``, plain and with the callback, on CPUs over gloo."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning as L
import torch
import torch.distributed as dist
import transformers
from helpers import QUIET, Run, causal_lm, collate, documents, leave, loader
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from zero_anywhere import ZeroAnywhere, zero_config
from zero_module import Module

from lightning_liger import LigerCallback
from lightning_liger.parallel import export

ROOT = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
IDS = torch.arange(3, 43).view(2, 20)


class BuiltLater(Module):
    """Its model is made where ZeRO stage 3 cuts every parameter as soon as it is there."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.seen = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            # transformers initialises the row of a padding id, which is in pieces by then
            self.model = causal_lm("llama", pad_token_id=None)


def train(module: Module, strategy: Any, callback: Any, data: Any = None, **options: Any) -> Run:
    run = Run()
    others = options.pop("callbacks", [])
    own = {"max_steps": 3, "accumulate_grad_batches": 2, "limit_val_batches": 2, "precision": "32-true", **options}
    ckpt_path = own.pop("ckpt_path", None)
    trainer = L.Trainer(
        strategy=strategy, callbacks=[*others, *([callback] if callback else [])], **{**QUIET, "devices": 2, **own}
    )
    trainer.fit(module, data or loader(), loader(seed=3), ckpt_path=ckpt_path)
    run.losses, run.trainer = list(module.seen), trainer
    run.report = callback.report.to_dict() if callback else {}
    return run


def whole(module: Module) -> dict[str, Tensor]:
    named = dict(module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {n: p.detach().float().clone() for n, p in named.items()}


def close(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b) > 0, (len(a), len(b))
    worst = max(abs(x - y) / max(abs(y), 1e-6) for x, y in zip(a, b, strict=True))
    assert worst <= 1e-5, worst
    return worst


def say(text: str) -> None:
    if RANK == 0:
        print(f"ok {text}", flush=True)


def stages() -> None:
    """Training with accumulation and clipping, validation within it and, after Lightning removed all hooks, behind it."""
    for stage, make in ((1, Module), (2, Module), (3, Module), (3, BuiltLater)):
        found = []
        for callback in (None, LigerCallback(verbose=False)):
            module = make()
            # the names of Lightning's registry are this class with these options
            strategy: Any = ZeroAnywhere(stage=stage, allgather_bucket_size=5000, reduce_bucket_size=5000)
            strategy.config.update(zero_force_ds_cpu_optimizer=False)
            run = train(module, strategy, callback, gradient_clip_val=0.5)
            run.trainer.validate(module, loader(seed=4), verbose=False)
            found.append((list(module.seen), whole(module)))
        worst = close(found[1][0], found[0][0])
        assert all(torch.allclose(found[1][1][n], t, rtol=1e-4, atol=1e-5) for n, t in found[0][1].items())
        assert run.report["fused_head"]["fused_calls"] > 0 and not run.report["fused_head"]["materialised_by"]
        assert run.report["padding_free"]["packed_calls"] > 0
        say(f"stage {stage}, {make.__name__}: {worst:.1e} over {len(found[0][0])} numbers")


def offload() -> None:
    for stage in (2, 3):
        places = {"offload_optimizer": {"device": "cpu"}}
        places |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
        seen = []
        for callback in (None, LigerCallback(verbose=False)):
            run = train(Module("llama"), ZeroAnywhere(config=zero_config(stage, **places)), callback)
            seen.append(run.losses)
        assert run.report["fused_head"]["fused_calls"] > 0
        say(f"stage {stage} with offload: {close(seen[1], seen[0]):.1e}")


def checkpoints() -> None:
    """Resumed with the callback where a plain run stopped and the other way round; exported to Hugging Face."""
    for stage in (1, 2, 3):
        runs = []
        for callback, other in ((None, LigerCallback(verbose=False)), (LigerCallback(verbose=False), None)):
            folder = ROOT / f"stage-{stage}-{'plain' if callback is None else 'ours'}"
            saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
            options: dict[str, Any] = {"accumulate_grad_batches": 1, "max_steps": 4, "limit_val_batches": 0}
            module = Module()
            train(
                module,
                ZeroAnywhere(config=zero_config(stage)),
                callback,
                enable_checkpointing=True,
                callbacks=[saving],
                **options,
            )
            again = Module()
            where = folder / "step=2.ckpt"
            train(again, ZeroAnywhere(config=zero_config(stage)), other, ckpt_path=where, **options)
            close(again.seen, module.seen[2 * 2 :])
            runs.append((whole(module), module.seen))
        close(runs[1][1], runs[0][1])
        if RANK == 0:
            out = ROOT / f"hf-{stage}"
            last = ROOT / f"stage-{stage}-ours" / "step=4.ckpt"
            export.export_checkpoint(last, out)
            model = transformers.AutoModelForCausalLM.from_pretrained(out)
            for name, tensor in model.named_parameters():
                assert torch.equal(tensor, runs[1][0][f"model.{name}"]), name
        dist.barrier()
        say(f"stage {stage}: resumed and exported")


def batches_without_a_size() -> None:
    """Loaders that cannot tell DeepSpeed a batch size, and batches filled by tokens."""
    ready = [collate(documents(16)[i : i + 4]) for i in range(0, 16, 4)]
    callback = LigerCallback(verbose=False)
    strategy = ZeroAnywhere(config=zero_config(2))
    options: dict[str, Any] = {"accumulate_grad_batches": 1, "limit_val_batches": 0, "use_distributed_sampler": False}
    run = train(Module(), strategy, callback, DataLoader(ready, batch_size=None), **options)  # type: ignore[arg-type]
    assert len(run.losses) == 6 and strategy.config["train_micro_batch_size_per_gpu"] == 1
    callback = LigerCallback(verbose=False, max_tokens_per_batch=48)
    strategy = ZeroAnywhere(config=zero_config(3))
    run = train(Module("llama"), strategy, callback, loader(count=32), max_steps=-1, max_epochs=1, limit_val_batches=0)
    report = callback.report.batching
    expected = round(32 / (report.steps * 2))
    assert report.steps and run.trainer.model.train_micro_batch_size_per_gpu() == expected, report
    say(f"{expected} samples in batches of 48 tokens")


CASES: list[Callable[[], None]] = [stages, offload, checkpoints, batches_without_a_size]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for case in CASES:
        if sys.argv[2:] and case.__name__ not in sys.argv[2:]:
            continue
        try:
            case()
        except BaseException:
            traceback.print_exc()
            sys.exit(f"failed: {case.__name__}")
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
