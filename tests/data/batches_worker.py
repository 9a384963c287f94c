"""Run by ``torchrun`` on two ranks: what each rank draws, over an epoch, interruptions, and another number of ranks."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from test_budget import FakeMemory, Moody, Watched
from test_streams import Counted, Stream
from test_training import BUDGET, Module, loader, numbered
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_liger.data.trial as trial
from lightning_liger import LigerCallback, LigerFSDPStrategy


def train(
    module: Module, out: Path, *, path: Any = None, save: str = "", data: Any = None, every: int = 2, **options: Any
) -> None:
    L.seed_everything(3, verbose=False)
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    saver = ModelCheckpoint(out / save, "{step}", every_n_train_steps=every, save_top_k=-1) if save else None
    strategy: Any = options.pop("strategy", DDPStrategy(process_group_backend="gloo") if devices > 1 else "auto")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=[LigerCallback(verbose=False, max_tokens_per_batch=BUDGET), *([saver] if saver else [])],
        enable_checkpointing=saver is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **options},
    )
    trainer.fit(module, loader() if data is None else data, ckpt_path=path)


def kinds(out: Path) -> None:
    """Loaders whose sampler is the user's, and a failure of one rank."""
    weights = torch.arange(tiny.COUNT).float() ** 2
    rank = int(os.environ["RANK"])

    def ddp(**options: Any) -> dict[str, Any]:
        return {"devices": 2, "strategy": DDPStrategy(process_group_backend="gloo"), **options}

    def note(name: str, module: tiny.Tiny) -> None:
        (out / f"{name}.{rank}.json").write_text(json.dumps(module.seen))

    weighted = WeightedRandomSampler(weights, tiny.COUNT)
    note("weighted", tiny.fit(tiny.loader(shuffle=False, sampler=weighted), **ddp()))
    pairs = DataLoader(tiny.Rows(), batch_sampler=Pairs(RandomSampler(range(60)), 2, False), collate_fn=tiny.masked)
    note("batch_sampler", tiny.fit(pairs, **ddp()))
    own = DistributedSampler(tiny.Rows(61), num_replicas=2, rank=rank, seed=9, drop_last=True)
    mine = tiny.loader(61, shuffle=False, sampler=own)
    note("own", tiny.fit(mine, **ddp(use_distributed_sampler=False)))
    note("stateful", tiny.fit(tiny.loader(kind=StatefulDataLoader), **ddp()))
    note("kept", tiny.fit(tiny.loader(), **ddp(budget="keep_samples")))
    for path, name in ((None, "stream"), (out / "stream" / "step=3.ckpt", "stream_resumed")):
        data = StatefulDataLoader(Counted(40 - 15 * rank), batch_size=4, collate_fn=numbered)
        module = Module()
        train(module, out, data=data, path=path, save="" if path else "stream", every=1)
        (out / f"{name}.{rank}.json").write_text(json.dumps(module.seen))
    for name, make in _sharding().items():
        for path in (None, out / name / "step=3.ckpt"):
            module = Module()
            train(module, out, path=path, save="" if path else name, every=3, strategy=make())
            (out / f"{name}{'_resumed' if path else ''}.{rank}.json").write_text(json.dumps(module.seen))
    trial.memory_of = FakeMemory  # type: ignore[assignment]
    for strategy in (DDPStrategy, partial(LigerFSDPStrategy, bf16=False)):
        gloo = partial(strategy, process_group_backend="gloo")
        found = tiny.fit(tiny.loader(), module=Watched(), budget="auto", max_epochs=1, **ddp(strategy=gloo()))
        budget = tiny.report(found)["budget"]
        assert 120 < budget <= 200, budget
        given = tiny.fit(tiny.loader(), module=Moody(), budget=budget, max_epochs=1, **ddp(strategy=gloo()))
        assert found.seen == given.seen and found.drawn == given.drawn and found.history == given.history
    for changes, options, message in (
        ({}, {"use_distributed_sampler": False}, "every rank reads a loader of its own"),
        ({}, {"budget": 20}, "samples have more tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny.fit(tiny.loader(**changes), **ddp(**options))


def _sharding() -> dict[str, Any]:
    """Strategies with checkpoints of their own."""
    found: dict[str, Any] = {"liger_fsdp": partial(LigerFSDPStrategy, bf16=False, process_group_backend="gloo")}
    if importlib.util.find_spec("deepspeed") is not None:
        from zero_anywhere import ZeroAnywhere, zero_config

        # Lightning writes into the configuration that it is given
        found["deepspeed"] = lambda: ZeroAnywhere(config=zero_config(2), process_group_backend="gloo")
    return found


class Pairs(BatchSampler):
    """Two at a time."""


def note(out: Path, name: str, module: Module) -> None:
    rank = os.environ.get("RANK", "0")
    (out / f"{name}.{rank}.json").write_text(json.dumps(module.seen))


def main(out: Path, part: str) -> None:
    runs: dict[str, dict[str, Any]] = {
        "whole": {"save": "first"},
        "resumed": {"path": out / "first" / "step=4.ckpt", "save": "second"},
        "again": {"path": out / "second" / "step=8.ckpt"},
        "from_one": {"path": out / "single" / "step=4.ckpt", "save": "third"},
        "single": {"save": "single"},
        "from_two": {"path": out / "third" / "step=6.ckpt"},
    }
    if "uneven" in part:
        module = Module()
        rank = int(os.environ["RANK"])
        stream = DataLoader(Stream(40 - 25 * rank), batch_size=4, collate_fn=numbered)
        train(module, out, data=stream)
        note(out, "uneven", module)
        part = part.replace(",uneven", "")
    if "kinds" in part:
        kinds(out)
        part = part.replace(",kinds", "")
    for name in part.split(","):
        module = Module()
        train(module, out, **runs[name])
        note(out, name, module)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
