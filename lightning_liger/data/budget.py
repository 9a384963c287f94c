"""How many tokens a batch may hold: the user's number, what keeps the samples per step, or what fits into memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lightning_liger.data.planner import Ints
from lightning_liger.data.report import BatchingReport
from lightning_liger.data.sampler import Share
from lightning_liger.data.trial import Trials, worst_batches

KEEP_SAMPLES = "keep_samples"
AUTO = "auto"

# Batches are dealt evenly whatever they may hold; this leaves room for the dealing.
_UNEVEN = 1.1
# A budget within so much of the largest is good enough.
_CLOSE = 1.05
_MOST_TRIALS = 8
# Two small batches do not tell what one of many times their size needs.
_FARTHEST = 4
# Of what a straight line through two trials predicts; the rest is for what does not grow in a straight line.
_TRUSTED = 0.95
_ROUND = 64


def choose_share(
    budget: int | str,
    lengths: Ints,
    drawn: int,
    steps_before: int,
    ranks: int,
    loader: DataLoader[Any],
    trainer: Any,
    report: BatchingReport,
) -> Share:
    """The budget that ``max_tokens_per_batch`` means for a loader.

    Args:
        budget: tokens; ``"keep_samples"``: as many samples per step, on average, as the user's own batches have, dealt
            so that batches hold about as many tokens as each other; ``"auto"``: the largest that fits into the memory of
            the device of every rank, or, where memory has no such limit, ``"keep_samples"``.
        lengths: ``(dataset,)`` tokens of each sample.
        drawn: samples in an epoch.
        steps_before: batches per rank that the user's loader would have made of them.
        ranks: data-parallel ranks.
        loader: the user's.
        trainer: with a module that is ready to train.
        report: is told how the budget was found.

    Raises:
        ValueError: under ``"auto"``, a module that cannot be tried before training, or not even the longest sample fits.
    """
    if isinstance(budget, int):
        return Share(ranks, budget)
    samples = drawn / (max(steps_before, 1) * ranks)
    even = max(int(lengths.max()), math.ceil(float(lengths.mean()) * samples * _UNEVEN))
    if budget == AUTO:
        trials = Trials.of(trainer, loader)
        if trials is not None:
            most = max(int(lengths.max()), math.ceil(int(lengths.sum()) / ranks))

            def peak(tokens: int) -> float | None:
                batches = worst_batches(lengths, tokens)
                needs = trials.peak(batches)
                # a few long samples may leave room that others fill
                return None if needs is None else needs * tokens / max(int(lengths[b].sum()) for b in batches)

            found = largest_budget(
                peak,
                start=min(even, most),
                least=int(lengths.max()),
                most=most,
                limit=trials.limit,
            )
            report.found = f"{found:,} tokens are what fits, of {trials.count} tried"
            return Share(ranks, found)
        report.found = "'auto' knows no limit of memory here; as many samples per step as before"
    else:
        report.found = "as many samples per step as before"
    return Share(ranks, even, samples)


def largest_budget(peak: Callable[[int], float | None], *, start: int, least: int, most: int, limit: float) -> int:
    """The largest budget, about, whose ``peak`` is within ``limit``.

    Args:
        peak: from a budget to what a batch of it needs, in the unit of ``limit``; None if it does not fit.
        start: where to begin.
        least: tokens of the longest sample.
        most: tokens that there are.
        limit: what is there.

    Raises:
        ValueError: ``least`` does not fit.
    """
    budget, needs, too_much = start, peak(start), most + 1
    while needs is None or needs > limit:
        if budget <= least:
            raise ValueError(
                f"max_tokens_per_batch='auto': not even the longest sample, {least:,} tokens, fits into the memory of the "
                "device. Cut long samples, use activation checkpointing or more devices."
            )
        too_much, budget = budget, max(least, budget // 2)
        needs = peak(budget)
    slope = needs / budget  # at most: what does not grow with the batch may be in it
    for _ in range(_MOST_TRIALS):
        reach = budget + (limit - needs) / max(slope, 1e-9) * _TRUSTED
        following = int(min(reach, _FARTHEST * budget, most))
        if following >= too_much:
            following = (budget + too_much) // 2
        if (following < budget * _CLOSE and following < most) or following <= budget:
            break
        their_needs = peak(following)
        if their_needs is None or their_needs > limit:
            too_much = following
        else:
            slope = (their_needs - needs) / (following - budget)
            budget, needs = following, their_needs
    return max(least, budget // _ROUND * _ROUND)
