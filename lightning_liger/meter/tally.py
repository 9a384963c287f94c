"""Integers that tokens and operations follow from, added up step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_liger.calls import BackboneCall, HeadCall


@dataclass
class Rows:
    """``needed`` ones, that a loss depends on, and ``computed`` ones."""

    needed: int = 0
    computed: int = 0

    def add(self, needed: int, computed: int) -> None:
        self.needed += needed
        self.computed += computed


@dataclass
class Tally:
    """
    Attributes:
        tokens: real ones. positions: padding included. samples: documents. All three are about the calls of a step that
            were differentiated, where any was: a teacher's tokens are the student's.
        documents: real and computed lengths, by backbone and whether gradients were recorded.
        beside: what layers beside a backbone see, by whether gradients were recorded.
        heads: rows of ``(inputs, outputs, weight_gradient, gradient)``.
        headless: rows of steps in which no head was seen, by whether gradients were recorded.
    """

    tokens: int = 0
    positions: int = 0
    samples: int = 0
    documents: dict[tuple[Any, bool], tuple[list[int], list[int]]] = field(default_factory=lambda: defaultdict(_lists))
    beside: dict[bool, Rows] = field(default_factory=lambda: defaultdict(Rows))
    heads: dict[tuple[int, int, bool, bool], Rows] = field(default_factory=lambda: defaultdict(Rows))
    headless: dict[bool, Rows] = field(default_factory=lambda: defaultdict(Rows))

    def add(self, calls: Sequence[BackboneCall], heads: Sequence[HeadCall]) -> None:
        """One step."""
        differentiated = any(c.gradient for c in calls)
        tokens = computed = 0
        for call in calls:
            real, ran = lengths_of(call)
            lengths, executed = self.documents[call.model, call.gradient]
            lengths += real
            executed += ran
            if call.gradient == differentiated:
                rows, length = call.shape
                tokens += sum(real)
                computed += sum(ran)
                self.positions += rows * length
                self.samples += max(len(real), rows)
        self.tokens += tokens
        self.beside[differentiated].add(tokens, computed)
        if not heads:
            self.headless[differentiated].add(tokens, computed)
        # what a metric reads besides is work, but not the model's
        losses = any(h.loss for h in heads)
        for use in heads:
            kind = (use.inputs, use.outputs, use.weight_gradient, use.gradient)
            needed = min(use.computed, tokens) if use.loss or not losses else 0
            self.heads[kind].add(needed, use.computed)


def _lists() -> tuple[list[int], list[int]]:
    return [], []


def lengths_of(call: BackboneCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the documents: real tokens, and what was computed."""
    rows, length = call.shape
    whole = (length,) * rows
    real = whole if call.lengths is None else call.lengths
    return real, (whole if call.executed is None else call.executed) or real
