"""Options of the callback in groups: none of them changes what is trained, and all ranks choose alike."""

from __future__ import annotations

from typing import Any

import modules
from helpers import Run
from runs import WORLD, distance, report_of
from sequence_equalities import BUDGET, Counts, Documents, numbered, same_weights, together
from sequence_runs import EXACT, SIZES, case, fit, mean_over_ranks, rows, say
from torch.utils.data import DataLoader

import lightning_liger.data.trial as trial


@case
def options_of_the_callback() -> None:
    reference = fit(modules.InInit(), rows(0))

    def check(k: int, name: str, **liger: Any) -> Run:
        run = fit(modules.InInit(), rows(WORLD // k), k, liger=liger)
        losses = mean_over_ranks(run.losses)
        loss = max(abs(a - b) / abs(b) for a, b in zip(losses, reference.losses, strict=True))
        weight = distance(run.parameters, reference.parameters)
        assert loss <= EXACT and weight <= EXACT, (name, loss, weight, losses, reference.losses)
        say(f"{name} in groups of {k}: loss {loss:.1e} weights {weight:.1e}")
        return run

    few, many = SIZES[0], SIZES[-1]
    assert check(few, "benchmark_steps", benchmark_steps=1).report["attribution"]
    check(few, "verify", verify="strict")
    check(many, "shape_buckets", shape_buckets=[16, 40, 64])
    check(few, "compile", compile="auto")
    check(many, "nothing fused", fused_head=False)


class Memory:
    """Bytes of a device of a rank, from the samples that the batch on trial holds."""

    tokens = 0

    def __init__(self, device: Any) -> None:
        del device

    def available(self) -> float:
        return 10_000_000

    def begin(self) -> float:
        return 0

    def peak(self) -> float:
        return 100_000.0 * Memory.tokens / SIZES[0]


class Watched(Counts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Memory.tokens = int(batch["attention_mask"].sum())
        numbers = batch.pop("numbers")
        if self.trainer.fit_loop.epoch_loop.batch_progress.current.ready:  # no trial
            self.steps.append(numbers)
        return self.model(**batch).loss


@case
def the_largest_batch_of_a_group() -> None:
    before, k = trial.memory_of, SIZES[0]
    trial.memory_of = Memory  # type: ignore[assignment]
    try:
        data = DataLoader(Documents(), batch_size=2, collate_fn=numbered, shuffle=True)
        run = fit(module := Watched(), data, k, liger={**BUDGET, "max_tokens_per_batch": "auto"})
    finally:
        trial.memory_of = before
    budget = report_of(run)["token_batches"]["budget"]
    # the fifth that is left over is for what does not grow with tokens
    assert 0.7 * k * 80 <= budget <= k * 100, budget
    steps = together(module, k)
    assert sorted(n for step in steps for n in step) == list(range(24))
    say(f"the largest batch of a group of {k}: {budget} tokens, {same_weights(run, steps)}")
