"""The same comparison inside of the user's own training: its first batch, forward and backward, with features muted.

No optimizer steps. Weights, gradients, random numbers, the module's own attributes and our counters are afterwards what
they were, so that training goes on as if nothing had been.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_liger.accelerate import Accelerated
from lightning_liger.bench.batches import contents, whole_numbers
from lightning_liger.bench.clock import Clock
from lightning_liger.bench.memory import PeakMemory
from lightning_liger.bench.messages import Failure, Plan, Turn
from lightning_liger.bench.results import Comparison, Row
from lightning_liger.bench.schedule import INSIDE
from lightning_liger.bench.showing import show
from lightning_liger.bench.variants import PLAIN, feature
from lightning_liger.bench.work import Work, peak_flops
from lightning_liger.data.randomness import random_numbers_untouched
from lightning_liger.data.trial import why_not_tried
from lightning_liger.data.untouched import module_untouched, nothing_logged
from lightning_liger.head.pending import settle_pending
from lightning_liger.patching import Rebound

_OPTION = "benchmark_steps"
_REMEDY = f"Leave {_OPTION} out, and measure with `lightning-liger bench`."
# Where bindings of a feature are defined; whatever else is bound stays on.
_PLACES = {
    "kernels": "lightning_liger.kernels.",
    "head": "lightning_liger.head.",
    "padding": "lightning_liger.padding.",
    "compile": "lightning_liger.compilation.",
}
# How blocks run is decided in the first training step itself; until then they are left as they are.
_LATER = ("compile",)


class NotMeasured(Exception):
    """Why this training cannot be measured from inside."""


def attribute_first_batch(
    handle: Accelerated, trainer: Any, module: Any, batch: Any, index: int, say: Callable[[str], None]
) -> None:
    """:func:`attribute`, told to the user and in the report."""
    rounds, report = handle.settings.benchmark_steps, handle.report
    try:
        found = attribute(handle, trainer, module, batch, index, rounds)
    except NotMeasured as error:
        report.note(f"{_OPTION}={rounds}: nothing was measured: {error}")
        return
    report.attribution = found.to_dict()
    say(show(found))


def attribute(handle: Accelerated, trainer: Any, module: Any, batch: Any, index: int, rounds: int) -> Comparison:
    """Plain, and one feature more at a time, in turns on ``batch``.

    Every rank calls it. ``rounds`` times per variant, after one to warm up.

    Raises:
        NotMeasured: this training cannot be measured from inside.
        ValueError: ``training_step`` writes parameters, which cannot be undone.
    """
    if reason := why_not_tried(trainer):
        raise NotMeasured(reason)
    held = contents(whole_numbers(batch))
    steps = _Steps(handle, trainer, module, batch, index)
    # what counts tokens, and changes nothing, is bound where padding stays as well
    present = [key for key in _PLACES if key not in _LATER and any(b.feature for b in steps.bindings[key])]
    rows = [Row(PLAIN, *steps.facts), *(Row(feature(key), *steps.facts) for key in present)]
    result = Comparison(Plan(1, 1, rounds), rows, name=f"{_OPTION}={rounds}", device=steps.name, order=INSIDE)
    work = Work(module).of([held])
    with handle.report.unnoticed(), nothing_logged(module):
        for number in range(rounds + 1):
            on = [(row, present[:count]) for count, row in enumerate(rows) if not row.failure]
            for row, keys in on if number % 2 else on[::-1]:
                try:
                    seconds, loss, peak = steps.run(keys)
                except torch.OutOfMemoryError as error:
                    if trainer.world_size > 1:
                        raise ValueError(
                            f"{_OPTION}={rounds}: {row.name} ran out of memory, after which several ranks cannot go on. "
                            f"{_REMEDY}"
                        ) from error
                    row.fail(Failure("out of memory", True))
                    continue
                turn = _turn(seconds, loss, peak, held, work)
                if number:
                    row.add_turn(turn)
                else:
                    row.add_warm_up(turn)
    steps.forget_peak()
    return result


def _turn(seconds: float, loss: float, peak: int, held: Any, work: float | None) -> Turn:
    return Turn(
        seconds=(seconds,),
        tokens=None if held.tokens is None else (held.tokens,),
        positions=(held.positions,),
        largest=held.positions,
        losses=(loss,),
        checksums=(held.checksum,),
        flops=None if work is None else (work,),
        peak_memory=peak,
        needs=0,
        free=0,
    )


class _Steps:
    """Forward and backward of one batch."""

    def __init__(self, handle: Accelerated, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self._handle = handle
        self._trainer = trainer
        self._module = module
        self._batch = batch
        self._index = index
        self._device: torch.device = trainer.strategy.root_device
        self._clock = Clock(self._device)
        self._tensors = [t for t in tree_leaves(_opened(batch)) if isinstance(t, Tensor)]
        self._copies = [t.detach().clone() for t in self._tensors]
        self._on_cpu = tree_map(lambda t: t.detach().cpu() if isinstance(t, Tensor) else t, _fresh(batch))
        live = [b for reference in handle.bindings() if (b := reference.binding()) is not None]
        self.bindings: dict[str, list[Rebound]] = {
            key: [b for b in live if f"{type(b).__module__}.".startswith(place)] for key, place in _PLACES.items()
        }

    @property
    def facts(self) -> tuple[str, float | None]:
        precision = str(self._trainer.precision)
        return precision, peak_flops(self._device, precision)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else str(self._device)

    def run(self, on: list[str]) -> tuple[float, float, int]:
        """Seconds, loss and peak bytes (0 where they say nothing) with the features ``on``, and no others."""
        cuda = self._device.type == "cuda"
        memory = PeakMemory(self._device) if cuda else None
        off = [b for key, bindings in self.bindings.items() if key not in on for b in bindings]
        versions = [t._version for t in self._tensors]
        strategy, module = self._trainer.strategy, self._module
        try:
            with (
                random_numbers_untouched(self._device),
                module_untouched(module, _OPTION, _REMEDY),
                _muted(off),
                torch.enable_grad(),
            ):
                arguments = self._trainer.fit_loop.epoch_loop._build_kwargs(
                    OrderedDict(), _fresh(self._batch), self._index
                )
                self._clock.begin()
                output = strategy.training_step(*arguments.values())
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor):
                    raise NotMeasured("training_step returned no loss for its first batch")
                strategy.pre_backward(loss)
                loss.backward()
                strategy.post_backward(loss)
                settle_pending()
                self._clock.tick()
                seconds, value = self._clock.seconds()[0], float(loss.detach())
                peak = memory.read() if memory is not None else 0
        finally:
            self._put_back(versions)
        return seconds, value, peak

    def forget_peak(self) -> None:
        """What was measured here is no part of the training's peak."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def _put_back(self, versions: list[int]) -> None:
        """Steps may write into their batch."""
        written = [i for i, t in enumerate(self._tensors) if t._version != versions[i]]
        with torch.no_grad():
            for i in written:
                self._tensors[i].copy_(self._copies[i])
        if written and self._device.type != "cpu":
            self._handle.book.pair(self._on_cpu, self._batch)


@contextmanager
def _muted(bindings: list[Rebound]) -> Iterator[None]:
    """Their modules run the original code."""
    for binding in bindings:
        binding.muted = True
    try:
        yield
    finally:
        for binding in bindings:
            binding.muted = False


def _fresh(batch: Any) -> Any:
    """The same tensors in containers of their own: steps pop what they have read."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        return copy.copy(batch)
    if isinstance(batch, dict):
        return type(batch)({k: _fresh(v) for k, v in batch.items()}) if type(batch) is dict else copy.copy(batch)
    if type(batch) in (list, tuple):
        return type(batch)(_fresh(v) for v in batch)
    return batch if isinstance(batch, Tensor) else copy.copy(batch)


def _opened(batch: Any) -> Any:
    """Containers that a tree walk goes through."""
    return dict(batch) if isinstance(batch, Mapping) else batch
