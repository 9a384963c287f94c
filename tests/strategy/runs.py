"""Training runs in processes that ``torchrun`` started, and the registry of what is checked there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import modules
import torch
import torch.distributed as dist
from helpers import Recorder, Run
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_liger import LigerCallback

ACCELERATOR = os.environ.get("TEST_ACCELERATOR", "cpu")
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if ACCELERATOR == "gpu" else "cpu")
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
    "use_distributed_sampler": False,
}


CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def train(module: Any, ranks: int, strategy: Any, callbacks: list[Any], tree: Any = L, **options: Any) -> Run:
    run = Run()
    if strategy != "auto" and not any(isinstance(c, LigerCallback) for c in callbacks):
        callbacks = [LigerCallback(verbose=False), *callbacks]
    devices: Any = ranks if ranks > 1 or ACCELERATOR == "cpu" else [DEVICE.index]
    trainer = tree.Trainer(
        accelerator=ACCELERATOR,
        devices=devices,
        strategy=strategy,
        callbacks=[Recorder(run), *callbacks],
        **{**QUIET, **options},
    )
    data = modules.loader(RANK if ranks > 1 else 0, ranks)
    trainer.fit(module, data, modules.loader(RANK if ranks > 1 else 0, ranks))
    run.parameters = whole(dict(module.named_parameters()))
    run.trainer = trainer
    run.metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return run


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu() for n, t in tensors.items()}


def mean_over_ranks(values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(tensor)
    return (tensor / WORLD).tolist()


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    norm = sum(float(t.double().norm() ** 2) for t in b.values()) ** 0.5
    return max(float((a[n].double() - b[n].double()).norm()) for n in b) / norm


def say(text: str) -> None:
    if RANK == 0:
        print(f"ok {text}", flush=True)


def report_of(run: Any) -> dict[str, Any]:
    return next(c.report.to_dict() for c in run.trainer.callbacks if isinstance(c, LigerCallback))


def raised(kind: type[BaseException], run: Callable[[], Any]) -> str:
    """What ``run`` raises, as text."""
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")
