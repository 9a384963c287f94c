"""MLPs in chunks on two ranks: gradients of the chunks are added up before they are reduced, and reduced once."""

from __future__ import annotations

from typing import Any

import lightning as L
import modules
from runs import WORLD, case, distance, mean_over_ranks, say, train

from lightning_liger import LigerCallback, LigerFSDPStrategy


def _compare(name: str, strategy: Any, **options: Any) -> None:
    one = train(modules.InInit("llama"), 1, "auto", [], L, **options)
    callback = LigerCallback(verbose=False, tiled_mlp=7)
    two = train(modules.InInit("llama"), WORLD, strategy, [callback], L, **options)
    losses = mean_over_ranks(two.losses)
    worst = max(abs(a - b) / abs(a) for a, b in zip(one.losses, losses, strict=True))
    parameter = distance(two.parameters, one.parameters)
    assert worst <= 1e-5 and parameter <= 1e-5, (name, worst, parameter)
    assert callback.report.tiling.calls > 0 and callback.report.tiling.applied == 2
    say(f"{name}: loss {worst:.1e} parameter {parameter:.1e}")


def _sharded(name: str, mode: Any) -> None:
    strategy = LigerFSDPStrategy(bf16=False, activation_checkpointing=mode)
    _compare(name, strategy, accumulate_grad_batches=2, gradient_clip_val=0.5)


@case
def tiled_mlp_sharded() -> None:
    _sharded("tiled_mlp_sharded", "none")


@case
def tiled_mlp_sharded_and_recomputed() -> None:
    _sharded("tiled_mlp_sharded_and_recomputed", "full")


@case
def tiled_mlp_ddp() -> None:
    _compare("tiled_mlp_ddp", "ddp")
