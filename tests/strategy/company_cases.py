"""What Lightning and PyTorch bring along, over shards: accumulation by hand, fine-tuning callbacks, tuners, clipping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import modules
import torch
import torch.distributed as dist
from behaviours import counting, trainer_for
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.tuner import Tuner
from runs import RANK, WORLD, case, distance, say, train, whole

from lightning_liger import LigerCallback, LigerFSDPStrategy


def compare(name: str, make: Callable[[], Any], callback: Callable[[], Any] | None = None, **options: Any) -> None:
    def callbacks() -> list[Any]:
        return [] if callback is None else [callback()]

    one = train(make(), 1, "auto", callbacks(), **options)
    two = train(make(), WORLD, LigerFSDPStrategy(bf16=False), callbacks(), **options)
    assert distance(two.parameters, one.parameters) < 1e-5
    assert distance(one.parameters, whole(dict(make().named_parameters()))) > 1e-3
    say(name)


@case
def accumulating_by_hand() -> None:
    """``toggle_model(sync_grad=False)`` keeps gradients on each rank until the last batch of a step."""

    class Accumulates(modules.Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            is_last = batch_idx % 2 == 1
            with optimizer.toggle_model(sync_grad=is_last):
                loss = self.model(**batch).loss
                self.manual_backward(loss / 2)
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
            return {"loss": loss.detach()}

    compare("accumulating_by_hand", lambda: Accumulates("llama"))
    with counting() as counts:
        ours = [LigerCallback(verbose=False, verify="off")]  # a proof reduces as well
        train(Accumulates("llama"), WORLD, LigerFSDPStrategy(bf16=False), ours, limit_val_batches=0)
    assert counts["reduce"] == 2 * 3, counts  # two steps; two blocks and the root


@case
def optimizers_of_different_pace() -> None:
    """One is clipped by norm and steps in every batch, the other by value in every second one."""

    class Alternates(modules.TwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first, second = self.optimizers()
            loss = self.one(**batch).loss
            first.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(first, 0.5, "norm")
            first.step()
            other = self.two(**batch).loss + 0.1 * self.one(**batch).loss.detach()
            self.manual_backward(other)
            if batch_idx % 2:
                self.clip_gradients(second, 0.01, "value")
                second.step()
                second.zero_grad()
            return {"loss": (loss + other).detach()}

        def configure_optimizers(self) -> Any:
            adam = torch.optim.AdamW(self.two.parameters(), 1e-2, eps=1e-3)
            return [torch.optim.SGD(self.one.parameters(), 0.1), adam]

    compare("optimizers_of_different_pace", Alternates)


@case
def accumulated_by_a_schedule() -> None:
    make = lambda: modules.InInit("llama")  # noqa: E731
    compare("accumulated_by_a_schedule", make, lambda: GradientAccumulationScheduler({0: 3, 1: 4}), max_epochs=2)


@case
def thawed_by_a_callback() -> None:
    class Thaws(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.model.model.layers)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.model.model.layers, optimizer, lr=0.05, initial_denom_lr=1)

    class Trainable(modules.InInit):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05)

    compare("thawed_by_a_callback", Trainable, Thaws, max_epochs=3)


@case
def clipped_by_torch() -> None:
    """Over shards and a parameter without dimensions at once."""

    class Clips(modules.OnTheModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)

    compare("clipped_by_torch", Clips)


@case
def scheduled_by_a_metric() -> None:
    class Scheduled(modules.InInit):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2, eps=1e-3)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    compare("scheduled_by_a_metric", Scheduled, max_epochs=3)


@case
def learning_rates_are_found() -> None:
    module = modules.InInit()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    module.lr = 0.1  # type: ignore[assignment]
    folder: list[Any] = [None]
    with TemporaryDirectory() as own:
        folder[0] = own
        dist.broadcast_object_list(folder)
        callbacks = [LigerCallback(verbose=False)]
        trainer = trainer_for(LigerFSDPStrategy(bf16=False), callbacks=callbacks, default_root_dir=Path(folder[0]))
        found: Any = Tuner(trainer).lr_find(module, modules.loader(RANK, WORLD), num_training=8, update_attr=False)
        assert len(found.results["lr"]) == 4
        assert distance(whole(dict(module.named_parameters())), before) == 0.0
        trainer.fit(module, modules.loader(RANK, WORLD))
        assert distance(whole(dict(module.named_parameters())), before) > 1e-3
        dist.barrier()
    say("learning_rates_are_found")
