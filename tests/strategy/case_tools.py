"""What the cases about checkpoints share: how they train on two processes, and how they compare."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import Run
from resuming import EXACT, RANK, WORLD, distance, mean_over_ranks, train, worst

from lightning_liger import LigerCallback, LigerFSDPStrategy

ROOT = Path(sys.argv[2])
KINDS = ("full", "sharded")
CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES.append(function)
    return function


def strategy(kind: str = "full", **options: Any) -> Any:
    return LigerFSDPStrategy(state_dict_type=kind, **{"bf16": False, **options})


def fit(module: Any, kind: str = "full", folder: str | None = None, **options: Any) -> Run:
    callbacks = [LigerCallback(verbose=False), *options.pop("callbacks", [])]
    made = strategy(kind, **options.pop("strategy", {}))
    where = None if folder is None else ROOT / folder
    return train(module, ranks=WORLD, strategy=made, folder=where, callbacks=callbacks, **options)


def plain(module: Any, **options: Any) -> Run:
    return train(module, ranks=1, strategy="auto", **options)


def same(run: Run, reference: Run, done: int = 0, average: tuple[bool, bool] = (True, True)) -> str:
    losses = mean_over_ranks(run.losses) if average[0] else run.losses
    expected = mean_over_ranks(reference.losses) if average[1] else reference.losses
    loss, weight = worst(losses, expected[done:]), distance(run.parameters, reference.parameters)
    found = f"loss {loss:.1e} weights {weight:.1e} over {len(losses)} steps"
    assert loss <= EXACT and weight <= EXACT, found
    return found


def say(text: str) -> None:
    if RANK == 0:
        print(f"ok {text}", flush=True)


def at(folder: str, step: int) -> Path:
    return ROOT / folder / f"step={step}.ckpt"
