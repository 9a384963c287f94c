"""Gradients of a step are gone when the next forward begins, unless somebody may still look at them."""

from __future__ import annotations

from typing import Any

import lightning as L
import modules
import pytest
import torch
from helpers import QUIET

from lightning_liger import LigerCallback, LigerFSDPStrategy


class Watches(modules.InInit):
    """Notes at each forward whether there are gradients."""

    seen: list[bool]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = [*getattr(self, "seen", []), any(p.grad is not None for p in self.parameters())]
        return super().training_step(batch, batch_idx)


class ReadsThem(Watches):
    read = 0

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.read += any(p.grad is not None for p in optimizer.param_groups[0]["params"])


class ZeroesItself(Watches):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Reader(L.Callback):
    read = 0

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.read += any(p.grad is not None for p in optimizer.param_groups[0]["params"])


class AsksTwice(Watches):
    """The optimizer asks for the loss twice in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=2)


def fit(module: Any, *callbacks: Any, **options: Any) -> L.Trainer:
    ours = [LigerCallback(verbose=False), *callbacks]
    trainer = L.Trainer(strategy=LigerFSDPStrategy(bf16=False), callbacks=ours, **{**QUIET, "max_steps": 3, **options})
    trainer.fit(module, modules.loader())
    return trainer


def test_they_are_gone() -> None:
    module = Watches()
    fit(module)
    assert module.seen == [False] * 3


def test_they_stay_where_a_hook_may_read_them() -> None:
    own, zeroes, callback, beside = ReadsThem(), ZeroesItself(), Reader(), Watches()
    fit(own)
    fit(zeroes)
    fit(beside, callback)
    for module in (own, zeroes, beside):
        assert module.seen == [False, True, True]
    assert (own.read, callback.read) == (2, 2)


def test_optimizers_that_ask_twice() -> None:
    plain, ours = AsksTwice(), AsksTwice()
    trainer = L.Trainer(**{**QUIET, "max_steps": 3})
    trainer.fit(plain, modules.loader())
    fit(ours)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name], parameter, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("every", [2, 3])
def test_accumulated_ones_stay(every: int) -> None:
    plain, ours = Watches(), Watches()
    trainer = L.Trainer(**{**QUIET, "max_steps": 3, "max_epochs": 9, "accumulate_grad_batches": every})
    trainer.fit(plain, modules.loader())
    fit(ours, accumulate_grad_batches=every, max_epochs=9)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name], parameter, rtol=1e-5, atol=1e-7)
