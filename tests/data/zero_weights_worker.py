"""The same comparison under DeepSpeed's engine, whose optimizers keep their gradients to themselves."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import warnings
from functools import partial
from typing import Any

import torch
from helpers import leave
from lightning.pytorch.strategies import DDPStrategy
from weights_worker import Labels, Manual, OwnLoss, accumulated, distance, one_big_batch
from zero_anywhere import ZeroAnywhere, zero_config


class EachStep(Manual):
    """One backward per step: DeepSpeed accumulates by its own count only."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.model(**batch).loss)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    whole = one_big_batch(0.5)
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        *((f"stage {stage}", Labels, zero_config(stage)) for stage in (0, 1, 2, 3)),
        ("stage 2, own loss", OwnLoss, zero_config(2)),
        ("stage 2, sums of ranks", Labels, {**zero_config(2), "gradient_allreduce_op": "sum"}),
    ]
    step_by_step = accumulated(EachStep(), partial(DDPStrategy, process_group_backend="gloo"), "tokens", 0.5)
    bf16 = {"bf16": {"enabled": True}}
    others: list[tuple[str, Any, dict[str, Any], Any, float]] = [
        ("stage 2, manual", EachStep, zero_config(2), step_by_step, 2e-6),
        # weights that are read back in bf16; the mean of means is off by more than half of the step
        ("stage 1, bf16", Labels, {**zero_config(1), **bf16}, whole, 0.1),
        ("stage 2, bf16", Labels, {**zero_config(2), **bf16}, whole, 0.1),
    ]
    for name, make, config, expected, tolerance in [*((*case, whole, 2e-6) for case in cases), *others]:
        if os.environ.get("TEST_CASES", "") not in name:
            continue
        strategy = partial(ZeroAnywhere, config=config, process_group_backend="gloo")
        found = distance(accumulated(make(), strategy, "tokens", 0.5), expected)
        if os.environ.get("RANK", "0") == "0":
            print(f"{name}: {found:.1e}", flush=True)
        assert found < tolerance, (name, found)
    means = accumulated(
        EachStep(), partial(ZeroAnywhere, config=zero_config(2), process_group_backend="gloo"), "batch", 0
    )
    assert distance(means, step_by_step) > 1e-2


if __name__ == "__main__":
    main()
    leave()
