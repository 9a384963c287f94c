"""Optimizers that are more than Adam, over sharded parameters: as on one process, resumable, or refused with the reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from case_tools import at, case, fit, plain, same, say
from helpers import causal_lm
from modules import _Labels
from resuming import distance, mean_over_ranks, worst


def matrices(module: Any) -> list[Any]:
    return [p for n, p in module.named_parameters() if p.ndim == 2 and "layers" in n]


def others(module: Any) -> list[Any]:
    return [p for n, p in module.named_parameters() if p.ndim != 2 or "layers" not in n]


def muon(module: Any) -> Any:
    return [torch.optim.Muon(matrices(module), lr=0.02), torch.optim.SGD(others(module), lr=0.1)]


def galore(module: Any) -> Any:
    from galore_torch import GaLoreAdamW

    projected = {"params": matrices(module), "rank": 8, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
    return GaLoreAdamW([{"params": others(module)}, projected], lr=1e-2, eps=1e-3, no_deprecation_warning=True)


def schedule_free(module: Any) -> Any:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(module.parameters(), lr=1e-2, eps=1e-3, warmup_steps=2)


def eight_bit(module: Any) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(module.parameters(), lr=1e-2)


def factored(module: Any) -> Any:
    return torch.optim.Adafactor(module.parameters(), lr=1e-2)


class Trained(_Labels, L.LightningModule):
    """One optimizer or several, stepped by hand."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.make = causal_lm("llama"), make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        optimizers: Any = self.optimizers()
        several = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer in several:
            optimizer.zero_grad()
            if hasattr(optimizer, "train"):  # schedule-free ones have two sets of weights
                optimizer.train()
        self.manual_backward(loss)
        for optimizer in several:
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return self.make(self)


# Muon works in bf16, and GaLore turns small gradients: how far two plain runs whose sums are in another order differ
RUN = [(muon, 1e-4, 5e-3, ""), (galore, 1e-5, 2e-3, "galore_torch"), (schedule_free, 1e-6, 1e-6, "schedulefree")]


@case
def optimizers_that_run() -> None:
    for make, loss, weights, package in RUN:
        name = make.__name__
        if package and importlib.util.find_spec(package) is None:
            say(f"{name}: {package} is not installed")
            continue
        expected = plain(Trained(make), max_epochs=1)
        through = fit(Trained(make), "full", f"optimizer-{name}", every=2, max_epochs=1)
        losses = worst(mean_over_ranks(through.losses), mean_over_ranks(expected.losses))
        parameters = distance(through.parameters, expected.parameters)
        assert losses <= loss and parameters <= weights, (name, losses, parameters)
        where = at(f"optimizer-{name}", 4 if make is muon else 2)  # each step of two optimizers counts twice
        if make is galore:
            with pytest.raises(ValueError, match=r"GaLoreProjector.*cannot be resumed under liger_fsdp"):
                fit(Trained(make), ckpt_path=where, weights_only=False, max_epochs=1)
            say(f"{name}: loss {losses:.1e} weights {parameters:.1e}")
            continue
        again = fit(Trained(make), ckpt_path=where, weights_only=False, max_epochs=1)
        say(f"{name}: loss {losses:.1e} weights {parameters:.1e}; resumed: {same(again, through, 2)}")


@case
def optimizers_that_are_refused() -> None:
    for make, package in ((factored, ""), (eight_bit, "bitsandbytes")):
        if package and importlib.util.find_spec(package) is None:
            say(f"{make.__name__}: {package} is not installed")
            continue
        module = Trained(make)
        with pytest.raises(
            ValueError, match=r"cannot update parameters that liger_fsdp has sharded.*torch\.optim\.AdamW"
        ):
            fit(module, max_epochs=1)
        assert module.trainer.global_step == 0
        say(f"{make.__name__} is refused before training")
