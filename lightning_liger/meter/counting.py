"""Tokens and operations of steps, added up from what backbones and heads have written down."""

from __future__ import annotations

from typing import Any

import torch

from lightning_liger.calls import BackboneCall, HeadCall
from lightning_liger.meter.flops import Flops
from lightning_liger.meter.operations import Operations
from lightning_liger.meter.peaks import ceiling
from lightning_liger.meter.tally import Tally
from lightning_liger.meter.window import Sums
from lightning_liger.report import Report

_WATCHED_BATCH = 1  # the first one after what is compared and chosen in the very first


class Counting:
    """Counts for one training.

    Args:
        report: whose logs are read, and which is told the totals and what is not known.
        head: path of the head, where the user has named one.
    """

    def __init__(self, report: Report, head: str | None = None) -> None:
        self._report = report
        self._head = head
        self._operations: Operations | None = None
        self._batches = 0
        self._watching = False
        self._steps: list[tuple[list[BackboneCall], list[HeadCall]]] = []
        self._flops = Flops()
        self._dtype = torch.float32
        self.forget()

    def begin(self, trainer: Any, module: Any) -> None:
        self._dtype = _computed_in(trainer, module)
        self._read_model(module)
        self.forget()

    def begin_epoch(self, module: Any, window: Sums) -> None:
        """Other parameters may train from here on."""
        if self._operations is not None and self._operations.is_stale(module):
            self.add_to(window)
            self._read_model(module)
            self._batches = 0

    def _read_model(self, module: Any) -> None:
        self._operations = Operations(module, self._head)

    def forget(self) -> None:
        """Drop what was written down until now, and have more written down."""
        self._take()
        self._steps = []

    def begin_batch(self) -> None:
        if self._batches == _WATCHED_BATCH and self._operations is not None:
            self._watching = True
            self._operations.begin_observing()

    def end_batch(self) -> None:
        """Set aside what was written down; it is added up when somebody asks."""
        self._batches += 1
        calls = self._take()
        if self._watching and self._operations is not None:
            self._watching = False
            sequence = self._report.sequence
            self._operations.end_observing(calls, 1 if sequence is None else sequence.ranks)
            if self._operations.structures:  # without tokens nothing is missed
                for reason in self._operations.unknown:
                    self._report.note(f"Utilisation (MFU) is not shown: {reason}")

    def _take(self) -> list[BackboneCall]:
        calls, heads = self._report.padding.log.take(), self._report.head.log.take()
        if calls or heads:
            self._steps.append((calls, heads))
        return calls

    def add_to(self, window: Sums) -> None:
        """Add what was written down since the last time."""
        self._take()
        tally = Tally()
        for calls, heads in self._steps:
            tally.add(calls, heads)
        self._steps = []
        flops = Flops() if self._operations is None else self._operations.of_tally(tally)
        window.tokens += tally.tokens
        window.positions += tally.positions
        window.samples += tally.samples
        window.model += flops.model
        window.hardware += flops.hardware
        self._flops += flops
        self._report.meter.update(
            model_flops=self._flops.model, attention_flops=self._flops.attention, hardware_flops=self._flops.hardware
        )

    def ceiling(self, device: torch.device) -> float:
        """FLOP/s that this rank's device could reach; 0 where operations are not known."""
        operations = self._operations
        if operations is None or operations.unknown or self._batches <= _WATCHED_BATCH:
            return 0.0
        try:
            found = ceiling(device, operations.dtype or self._dtype)
        except (torch.OutOfMemoryError, RuntimeError) as error:  # where it must be measured, and cannot be
            self._report.meter["utilisation_of"] = f"not known: {error}"
            return 0.0
        self._report.meter["utilisation_of"] = found.text
        return found.tflops * 1e12

    def close(self) -> None:
        if self._operations is not None:
            self._operations.stop_observing()
        for log in (self._report.padding.log, self._report.head.log):
            log.take()
            log.wanted = False


def _computed_in(trainer: Any, module: Any) -> torch.dtype:
    """The dtype of products, where none can be watched."""
    precision = str(getattr(trainer, "precision", ""))
    if "bf16" in precision:
        return torch.bfloat16
    if precision.startswith("16"):
        return torch.float16
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
