"""What else users count on: data, collectives, evaluation before and after, calls from anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning as L
import modules
import torch
import torch.distributed as dist
import torch.nn as nn
from lightning.pytorch.callbacks import Callback
from runs import (
    ACCELERATOR,
    DEVICE,
    QUIET,
    RANK,
    WORLD,
    case,
    distance,
    report_of,
    say,
    train,
    whole,
)
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerFSDPStrategy


def trainer_for(strategy: Any = "liger_fsdp", **options: Any) -> L.Trainer:
    return L.Trainer(accelerator=ACCELERATOR, devices=WORLD, strategy=strategy, **{**QUIET, **options})


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Collectives and their elements while the context is open."""
    counts: Counter[str] = Counter()
    # reduce_scatter_single is what newer releases call
    names = [n for n in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, n)]
    before = {name: getattr(dist, name) for name in names}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = kwargs["input"] if "input" in kwargs else args[1]
            counts["reduce"] += 1
            counts["bytes"] += tensor.numel() * tensor.element_size()
            return before[name](*args, **kwargs)

        return call

    for name in before:
        setattr(dist, name, counted(name))
    try:
        yield counts
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


@case
def every_rank_has_data_of_its_own() -> None:
    class Seen(modules.InInit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(int(row.sum()) for row in batch["input_ids"])
            return super().training_step(batch, batch_idx)

    seen: list[int] = []
    data: Any = modules.rows()
    trainer = trainer_for(use_distributed_sampler=True)
    assert not any(isinstance(c, LigerCallback) for c in trainer.callbacks)
    trainer.fit(Seen(), DataLoader(data, batch_size=2, collate_fn=modules.collate))
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, seen)
    assert sorted(x for own in everyone for x in own) == sorted(int(r.sum()) for r in data)
    # and without a callback of the user's, one joins: the report is there
    assert report_of(SimpleNamespace(trainer=trainer))["padding_free"]["packed_calls"] > 0
    say("every_rank_has_data_of_its_own")


@case
def one_reduction_in_a_step() -> None:
    """Two steps of four micro-batches: each group is reduced twice, in fp32."""
    module = modules.InInit("llama")
    size = sum(p.numel() for p in module.parameters())
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2, "limit_val_batches": 0}
    with counting() as counts:
        train(module, WORLD, "liger_fsdp", [LigerCallback(verbose=False, verify="off")], **options)
    assert counts["reduce"] == 2 * 3, counts  # two blocks and the root
    assert 2 * 4 * size <= counts["bytes"] <= 1.1 * 2 * 4 * size, counts
    say(f"one_reduction_in_a_step: {counts['bytes'] // 2} bytes reduced for {size} parameters")


@case
def evaluating_before_and_after() -> None:
    """validate, fit, validate, test and predict with one Trainer; then another Trainer goes on."""

    class All(modules.OwnLoss):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.model(**batch).loss, sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch["input_ids"], batch["attention_mask"]).argmax(-1)

    def everything(ranks: int, strategy: Any) -> list[Any]:
        rank = RANK if ranks > 1 else 0
        devices: Any = ranks if ranks > 1 or ACCELERATOR == "cpu" else [DEVICE.index]
        module, found = All(), []
        for _ in range(2):
            trainer = L.Trainer(accelerator=ACCELERATOR, devices=devices, strategy=strategy(), **QUIET)
            loader = modules.loader(rank, ranks)
            found.append(trainer.validate(module, loader, verbose=False)[0]["val_loss"])
            trainer.fit(module, loader, loader)
            found.append(trainer.validate(module, loader, verbose=False)[0]["val_loss"])
            found.append(trainer.test(module, loader, verbose=False)[0]["test_loss"])
            predicted: Any = trainer.predict(module, loader)
            assert len(predicted) == 4
        return found

    def ours() -> Any:
        return LigerFSDPStrategy(bf16=False)

    one, two = everything(1, lambda: "auto"), everything(WORLD, ours)
    assert one[0] != one[1], one
    for a, b in zip(one, two, strict=True):
        assert abs(a - b) <= 1e-5 * a, (one, two)
    say("evaluating_before_and_after")


@case
def calls_from_hooks_and_callbacks() -> None:
    """The model is called and generates outside of any step, between the steps of a training that it does not disturb."""

    class Curious(modules.InInit):
        def on_fit_start(self) -> None:
            look(self)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            look(self)

        def on_validation_epoch_end(self) -> None:
            look(self)

    class Sampler(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            prompt = torch.tensor([[5, 6, 7]], device=pl_module.device)
            with torch.no_grad():
                made.append(pl_module.model.generate(prompt, max_new_tokens=4, do_sample=False).tolist())

    def look(module: Any) -> None:
        ids = torch.tensor([[5, 6, 7, 8]], device=module.device)
        values.append(float(module.model(ids).logits.sum()))
        values.append(float(module.model.model.embed_tokens(ids).sum()))

    both = []
    for ranks, strategy in ((1, "auto"), (WORLD, LigerFSDPStrategy(bf16=False))):
        values: list[float] = []
        made: list[Any] = []
        run = train(Curious(), ranks, strategy, [Sampler()])
        both.append((values, made, run.parameters))
    (values, made, parameters), (our_values, our_made, our_parameters) = both
    assert made == our_made and len(made) == 4
    torch.testing.assert_close(torch.tensor(our_values), torch.tensor(values), rtol=1e-4, atol=1e-4)
    assert distance(our_parameters, parameters) < 1e-5
    say("calls_from_hooks_and_callbacks")


@case
def unseeded_ranks_start_alike() -> None:
    class Random(modules.InInit):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(100 + RANK)
            for parameter in self.parameters():
                nn.init.normal_(parameter)
            self.table: Tensor
            self.register_buffer("table", torch.rand(3))

    module = Random()
    train(module, WORLD, LigerFSDPStrategy(bf16=False), [], max_steps=0, max_epochs=-1, limit_val_batches=0)
    torch.manual_seed(100)
    expected = torch.empty_like(whole(dict(module.named_parameters()))["model.model.embed_tokens.weight"])
    nn.init.normal_(expected)
    found = whole(dict(module.named_parameters()))["model.model.embed_tokens.weight"]
    assert torch.equal(found, expected)
    tables = [torch.empty(3, device=DEVICE) for _ in range(WORLD)]
    dist.all_gather(tables, module.table.to(DEVICE))
    assert torch.equal(tables[0], tables[1])
    say("unseeded_ranks_start_alike")
