"""Modules that do things too early, too late or not at all, and being given back whole."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import modules
import torch
import torch.nn as nn
from runs import (
    WORLD,
    case,
    distance,
    raised,
    report_of,
    say,
    train,
    whole,
)
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_liger import LigerFSDPStrategy, grad_norm


@case
def parameters_collected_too_early() -> None:
    class Early(modules.InInit):
        def __init__(self) -> None:
            super().__init__()
            self.collected = list(self.model.parameters())

        def configure_optimizers(self) -> Any:
            return modules.sgd(self.collected)

    one = train(Early(), 1, "auto", [])
    two = train(Early(), WORLD, LigerFSDPStrategy(bf16=False), [])
    assert distance(two.parameters, one.parameters) < 1e-5
    assert distance(one.parameters, whole(dict(Early().named_parameters()))) > 1e-3
    say("parameters_collected_too_early")


@case
def changes_that_come_too_late() -> None:
    class Resized(modules.InInit):
        def on_fit_start(self) -> None:
            self.model.resize_token_embeddings(128)

    class Replaced(modules.InInit):
        def on_fit_start(self) -> None:
            self.model.model.norm.weight = nn.Parameter(torch.ones(32, device=self.device))

    for kind in (Resized, Replaced):
        message = raised(RuntimeError, lambda k=kind: train(k(), WORLD, "liger_fsdp", []))  # type: ignore[misc]
        assert "configure_model" in message and "on_fit_start" in message, message
    say("changes_that_come_too_late")


@case
def norms_of_gradients() -> None:
    """A drop-in for Lightning's own helper, which asks for numbers that no rank holds."""
    from lightning.pytorch.utilities import grad_norm as lightnings

    class Norms(modules.OnTheModule):
        norms: Any = lightnings

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for norm_type in (2, "inf"):
                found.append({n: float(v) for n, v in type(self).norms(self, norm_type=norm_type).items()})

    class Ours(Norms):
        norms = grad_norm

    found: list[dict[str, float]] = []
    train(Norms(), 1, "auto", [])
    expected, found = found, []
    train(Ours(), WORLD, LigerFSDPStrategy(bf16=False), [])
    for a, b in zip(expected, found, strict=True):
        assert a.keys() == b.keys()
        assert all(abs(a[n] - b[n]) <= 2e-5 * max(a.values()) for n in a), (a, b)
    message = raised(RuntimeError, lambda: train(Norms(), WORLD, "liger_fsdp", []))
    assert "lightning_liger.grad_norm" in message, message
    say("norms_of_gradients")


@case
def training_again_after_an_exception() -> None:
    """In the middle of a forward, and in the middle of a backward; on every rank, as one that is caught would be."""

    class Broken(modules.InInit):
        where = ""

        def __init__(self) -> None:
            super().__init__("llama")
            self.model.model.layers[1].mlp.register_forward_hook(self.fail)

        def fail(self, layer: Any, args: Any, output: Tensor) -> None:
            if self.where == "forward":
                raise KeyError("in the middle of a forward")
            if self.where == "backward":
                output.register_hook(lambda gradient: 1 / 0)

    one = train(modules.InInit("llama"), 1, "auto", [])
    module = Broken()
    for where, kind in (("forward", KeyError), ("backward", ZeroDivisionError)):
        module.where = where
        raised(kind, lambda: train(module, WORLD, LigerFSDPStrategy(bf16=False), []))
    module.where = ""
    two = train(module, WORLD, LigerFSDPStrategy(bf16=False), [])
    assert distance(two.parameters, one.parameters) < 1e-5
    say("training_again_after_an_exception")


@case
def everything_is_given_back() -> None:
    module = modules.OnTheModule()
    plain = {n: type(m) for n, m in module.named_modules()}
    run = train(module, WORLD, LigerFSDPStrategy(bf16=False), [])
    run.trainer.strategy.restore_module()
    assert {n: type(m) for n, m in module.named_modules()} == plain
    assert not any(isinstance(p, DTensor) for p in module.parameters())
    assert distance({n: p.detach() for n, p in module.named_parameters()}, run.parameters) == 0
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    assert "training_step" not in module.__dict__
    again = train(module, WORLD, LigerFSDPStrategy(bf16=False), [])
    assert distance(again.parameters, run.parameters) > 1e-4
    say("everything_is_given_back")


@case
def hybrid_sharding_with_whole_copies() -> None:
    one = train(modules.OnTheModule(), 1, "auto", [], gradient_clip_val=0.5)
    run = train(
        modules.OnTheModule(),
        WORLD,
        LigerFSDPStrategy(replicate_size=WORLD, bf16=False),
        [],
        gradient_clip_val=0.5,
    )
    assert distance(run.parameters, one.parameters) < 1e-5
    report = report_of(run)["sharding"]
    assert (report["copies"], report["ranks"]) == (WORLD, 1)
    gc.collect()
    say("hybrid_sharding_with_whole_copies")


@case
def sharded_modules_can_be_freed() -> None:
    module = modules.InInit()
    references = [weakref.ref(module), weakref.ref(module.model.model.layers[0])]
    run = train(module, WORLD, "liger_fsdp", [])
    references.append(weakref.ref(run.trainer))
    del module, run
    gc.collect()
    assert [r() for r in references] == [None] * 3, [gc.get_referrers(r()) for r in references if r() is not None]
    say("sharded_modules_can_be_freed")
