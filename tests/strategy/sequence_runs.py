"""Four processes that ``torchrun`` started train in groups that share a batch: how, and how that is compared."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import modules
import torch
import torch.distributed as dist
from helpers import Recorder, Run
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import ACCELERATOR, DEVICE, QUIET, RANK, WORLD, distance, whole
from torch.utils.data import DataLoader, DistributedSampler

from lightning_liger import LigerCallback, LigerFSDPStrategy, LigerFSDPStrategyPL

# sums of embeddings' gradients have no order on a GPU
EXACT = 1e-6 if ACCELERATOR == "cpu" else 2e-5
# of groups; the smaller one makes several of them
SIZES = (2, WORLD) if WORLD > 2 else (2,)
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def rows(ranks: int, count: int = 16) -> DataLoader[Any]:
    """Four rows a step on any number of ranks, in order, by a sampler that counts all of them."""
    data: Any = modules.rows(count)
    sampler: Any = DistributedSampler(data, WORLD, RANK, shuffle=False) if ranks else None
    return DataLoader(data, batch_size=4 // max(ranks, 1), collate_fn=modules.collate, sampler=sampler)


def fit(
    module: Any,
    data: Any,
    k: int = 0,
    *,
    ckpt_path: Any = None,
    liger: Any = None,
    val: Any = None,
    tree: Any = L,
    **options: Any,
) -> Run:
    """Train on all four ranks with groups of ``k``, or in this process alone (``k=0``), plain without ``liger``."""
    run = Run()
    callbacks = [Recorder(run), *options.pop("callbacks", [])]
    if k:
        kind: Any = LigerFSDPStrategy if tree is L else LigerFSDPStrategyPL
        strategy: Any = kind(bf16=False, sequence_parallel_size=k, **options.pop("strategy", {}))
    else:
        strategy = "auto"
        options.pop("strategy", None)
    if k or liger is not None:
        callbacks.insert(1, LigerCallback(verbose=False, **(liger or {})))
    quiet = {**QUIET, "use_distributed_sampler": True, "accelerator": ACCELERATOR}
    alone: Any = 1 if ACCELERATOR == "cpu" else [DEVICE.index]
    trainer = tree.Trainer(
        devices=WORLD if k else alone, strategy=strategy, callbacks=callbacks, **{**quiet, **options}
    )
    run.trainer = trainer
    trainer.fit(module, data, val, ckpt_path=ckpt_path)
    run.parameters = whole(dict(module.named_parameters()))
    run.metrics = {n: float(v) for n, v in trainer.callback_metrics.items() if not n.startswith("liger/")}
    run.report = next((c.report.to_dict() for c in callbacks if isinstance(c, LigerCallback)), {})
    return run


def mean_over_ranks(values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(tensor)
    return (tensor / WORLD).tolist()


def same(run: Run, reference: Run) -> str:
    losses = mean_over_ranks(run.losses)
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, reference.losses, strict=True))
    weight = distance(run.parameters, reference.parameters)
    found = f"loss {loss:.1e} weights {weight:.1e} over {len(losses)} steps"
    assert loss <= EXACT and weight <= EXACT, found
    return found


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def say(text: str) -> None:
    if RANK == 0:
        print(f"ok {text}", flush=True)


class saved:
    """A folder that every rank sees, and what saves into it every few steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def __enter__(self) -> tuple[Path, ModelCheckpoint]:
        self.folder = Path(everywhere(tempfile.mkdtemp())[0])
        options: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": self.every}
        return self.folder, ModelCheckpoint(self.folder, "{step}", **options)

    def __exit__(self, *_: Any) -> None:
        dist.barrier()
        if RANK == 0:
            shutil.rmtree(self.folder)
