"""Floating-point operations of the steps of one module: its backbones, its heads, and what lies outside of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn

from lightning_liger.calls import BackboneCall, HeadCall
from lightning_liger.head.finding import find_heads
from lightning_liger.meter.flops import Call, Flops, ModelCost, Product, head_flops
from lightning_liger.meter.observing import Observation
from lightning_liger.meter.structure import NEGLIGIBLE, Structure, read_structure
from lightning_liger.meter.tally import Tally, lengths_of
from lightning_liger.padding.backbones import find_backbones
from lightning_liger.padding.plain_decoder.finding import find_decoders


class Operations:
    """Counts operations of training steps from the calls that were written down.

    Args:
        module: the LightningModule, or any other that holds backbones.
        head: path of the head, where the user has named one.

    Attributes:
        dtype: in which products are computed; None before a step was watched, and where layers are compiled.
    """

    def __init__(self, module: nn.Module, head: str | None = None) -> None:
        found, refused = find_backbones(module)
        backbones = [*found, *refused, *(d.module for d in find_decoders(module))]
        self._heads = tuple(dict.fromkeys(find_heads(module, head)[0]))
        skip = frozenset(self._heads)
        self.structures: dict[nn.Module, Structure] = {b: read_structure(b, skip) for b in backbones}
        inside = {m for b in backbones for m in b.modules()} | set(skip)
        self._outside = read_structure(module).without(inside)
        self._module = module
        self._observations: list[Observation] = []
        self._beside_seen: Observation | None = None
        self._watched = False
        self._trained = _trained(module)
        self.dtype: torch.dtype | None = None
        self._settle()

    def _settle(self) -> None:
        self._costs: dict[nn.Module, ModelCost] = {m: s.cost for m, s in self.structures.items()}
        self._beside = ModelCost(tuple(p for _, p in self._outside.products))
        self._head_costs = [
            Product("head", h.in_features, h.out_features, 1.0, h.weight.requires_grad)
            for h in self._heads
            if isinstance(h, nn.Linear)
        ]

    @property
    def unknown(self) -> list[str]:
        """Why operations would be counted wrong; empty when they are right."""
        if not self._costs:
            return ["no backbone whose tokens are known was found"]
        reasons = [reason for cost in self._costs.values() for reason in cost.unknown]
        whole = sum(c.per_token for c in self._costs.values())
        # one row for each token is no guess, whatever it is for
        strange = [p for p in self._beside.products if not 0.99 < p.rows < 1.01 or not self._watched]
        share = sum(p.forward for p in strange) / whole if whole else 0.0
        if share > NEGLIGIBLE:
            largest = max(strange, key=lambda p: p.forward)
            reasons.append(
                f"{largest.name} and others beside the backbone compute {share:.0%} of what it does, for rows that are "
                "no tokens"
            )
        return reasons

    def is_stale(self, module: nn.Module) -> bool:
        """Whether other parameters train now."""
        return _trained(module) != self._trained

    # -- one step that is watched ------------------------------------------------------------------------------------

    def begin_observing(self) -> None:
        self._observations = [Observation(m, s) for m, s in self.structures.items()]
        self._beside_seen = Observation(self._module, self._outside, runs_once=True)
        for observation in (*self._observations, self._beside_seen):
            observation.begin()

    def stop_observing(self) -> None:
        for observation in (*self._observations, *([self._beside_seen] if self._beside_seen else [])):
            observation.end()

    def end_observing(self, calls: Sequence[BackboneCall], slices: int = 1) -> None:
        """
        Args:
            calls: those of the step that was watched.
            slices: among how many ranks the tokens of packed calls are divided.
        """
        self.stop_observing()
        for observation in self._observations:
            mine = [c for c in calls if c.model is observation.model]
            positions = sum(sum(lengths_of(c)[1]) // (1 if c.executed is None else slices) for c in mine)
            if positions:
                self.structures[observation.model] = observation.learnt(positions)
            self.dtype = observation.dtype or self.dtype
        # what stands behind a backbone sees its padded output
        tally = Tally()
        tally.add(calls, ())
        if self._beside_seen is not None and tally.positions:
            self._outside = self._beside_seen.learnt(tally.positions)
        self._observations, self._beside_seen, self._watched = [], None, True
        self._settle()

    # -- counting ----------------------------------------------------------------------------------------------------

    def of(self, calls: Sequence[BackboneCall], heads: Sequence[HeadCall]) -> Flops:
        """Operations of one step: of the calls, and of the heads that were used in it."""
        tally = Tally()
        tally.add(calls, heads)
        return self.of_tally(tally)

    def of_tally(self, tally: Tally) -> Flops:
        """Operations of all steps in it."""
        total = Flops()
        for (model, gradient), (lengths, executed) in tally.documents.items():
            cost = self._costs.get(model)
            if cost is not None:
                total += cost.flops(Call(tuple(lengths), tuple(executed), gradient))
        for gradient, rows in tally.beside.items():
            total += self._beside.flops(Call((rows.needed,), (rows.computed,), gradient))
        for (inputs, outputs, weight_gradient, gradient), rows in tally.heads.items():
            head = Product("head", inputs, outputs, 1.0, weight_gradient)
            total += head_flops(head, rows.needed, rows.computed, gradient=gradient)
        for gradient, rows in tally.headless.items():
            for head in self._head_costs:
                total += head_flops(head, rows.needed, rows.computed, gradient=gradient)
        return total


def _trained(module: nn.Module) -> int:
    return hash(tuple(p.requires_grad for p in module.parameters()))
