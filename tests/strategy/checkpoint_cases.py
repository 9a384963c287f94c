"""Two processes, one launch: what is around checkpoints, callbacks, formats, exports and failures."""

from __future__ import annotations

import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import adapter_cases
import export_cases
import failure_cases
import lightning as L
import modules
import optimizer_cases
import pytest
import pytorch_lightning as pl
import state_cases
import torch
import torch.distributed as dist
from case_tools import CASES, KINDS, ROOT, at, case, fit, plain, same, say
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from resuming import ACCELERATOR, EXACT, RANK, WORLD, Batches, Hard, HardPL, distance, train, whole, worst

from lightning_liger import LigerFSDPStrategyPL
from lightning_liger.parallel.directories import consolidate
from lightning_liger.parallel.sharded import is_sharded


@case
def accumulation() -> None:
    for kind in KINDS:
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        through = fit(Hard(), kind, f"accumulate-{kind}", **options)
        assert len(through.losses) == 16
        again = fit(Hard(), kind, ckpt_path=at(f"accumulate-{kind}", 3), **options)
        say(f"accumulation {kind}: {same(again, through, 6)}")


class Adapters(modules.Adapters):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), 1e-2, eps=1e-3)


@case
def adapters_alone() -> None:
    for kind in KINDS:
        options = {"exclude_frozen_parameters": True}
        through = fit(Adapters(), kind, f"adapters-{kind}", strategy=options)
        again = fit(Adapters(), kind, ckpt_path=at(f"adapters-{kind}", 3), strategy=options)
        say(f"adapters {kind}: {same(again, through, 3)}")
    saved = torch.load(at("adapters-full", 3), weights_only=True)["state_dict"]
    assert saved and all("lora_" in name for name in saved), list(saved)
    everything = fit(Adapters(), "full", "adapters-all", max_epochs=1)
    assert len(torch.load(at("adapters-all", 3), weights_only=True)["state_dict"]) == len(everything.parameters)
    with pytest.raises(RuntimeError, match=r"Missing key"):
        Adapters.load_from_checkpoint(at("adapters-full", 3))
    Adapters.load_from_checkpoint(at("adapters-full", 3), strict=False)
    say("adapters alone only if asked")


class TwoOptimizers(modules.TwoOptimizers):
    def configure_optimizers(self) -> Any:
        # not from estimated_stepping_batches: Lightning then forgets where the loader was (#20550)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (self.one, self.two)]
        return optimizers, [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=8) for o in optimizers]


@case
def several_optimizers() -> None:
    for kind in KINDS:
        through = fit(TwoOptimizers(), kind, f"optimizers-{kind}", every=4)
        again = fit(TwoOptimizers(), kind, ckpt_path=at(f"optimizers-{kind}", 4))
        say(f"two optimizers {kind}: {same(again, through, 2)}")


@case
def weights_only() -> None:
    for kind in KINDS:
        keep = ModelCheckpoint(
            dirpath=ROOT / f"weights-{kind}", save_weights_only=True, every_n_train_steps=3, filename="{step}"
        )
        fit(Hard(), kind, callbacks=[keep], enable_checkpointing=True, max_epochs=1)
        path = at(f"weights-{kind}", 3)
        with pytest.warns(UserWarning, match="holds weights only") if RANK == 0 else warnings.catch_warnings():
            started = fit(Hard(), kind, ckpt_path=path, max_epochs=1)
        fresh = fit(Hard.load_from_checkpoint(path, weights_only=False), kind, max_epochs=1)
        say(f"weights only {kind}: {same(started, fresh)}")


class Opaque:
    """Neither a tensor nor plain data."""


class WithObject(Hard):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["opaque"] = Opaque()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert isinstance(checkpoint["opaque"], Opaque)
        assert "state_dict" in checkpoint


@case
def objects_in_checkpoints() -> None:
    for kind in KINDS:
        through = fit(WithObject(), kind, f"object-{kind}")
        again = fit(WithObject(), kind, ckpt_path=at(f"object-{kind}", 3), weights_only=False)
        with pytest.raises(Exception, match="weights_only"):
            fit(WithObject(), kind, ckpt_path=at(f"object-{kind}", 3))
        say(f"objects {kind}: {same(again, through, 3)}")


@case
def callbacks() -> None:
    for kind in KINDS:
        best = ModelCheckpoint(
            dirpath=ROOT / f"best-{kind}", monitor="val_loss", save_top_k=2, save_last="link", filename="{epoch}-{step}"
        )
        stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)
        rates = LearningRateMonitor("step")
        logger = CSVLogger(ROOT / f"logs-{kind}")
        run = fit(
            Hard(), kind, callbacks=[best, stop, rates], val=Batches(RANK, WORLD), enable_checkpointing=True,
            val_check_interval=2, max_epochs=4, logger=logger, log_every_n_steps=1,
        )  # fmt: skip
        assert stop.stopped_epoch == 0 and run.trainer.global_step == 4, run.trainer.global_step
        there = sorted(p.name for p in (ROOT / f"best-{kind}").iterdir())
        assert there == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"], there
        assert (ROOT / f"best-{kind}" / "last.ckpt").resolve().name == "epoch=0-step=4.ckpt"
        logged = Path(logger.log_dir) / "metrics.csv"
        assert RANK != 0 or "lr-AdamW" in logged.read_text()
        # validation has gathered the root, and fit has ended: the same trainer reads the best back
        found = run.trainer.validate(dataloaders=Batches(RANK, WORLD), ckpt_path="best", verbose=False)
        assert abs(found[0]["val_loss"] - float(best.best_model_score)) < EXACT * float(best.best_model_score)
        longer = fit(Hard(), kind, ckpt_path=ROOT / f"best-{kind}" / "last.ckpt", max_epochs=2)
        # as without this package: to a checkpoint from within validation, the batch before it is not complete
        assert len(longer.losses) == 5, len(longer.losses)
        say(f"callbacks {kind}: best {float(best.best_model_score):.4f} read back by validate")


@case
def averages() -> None:
    makers: list[Any] = [WeightAveraging, lambda: EMAWeightAveraging(decay=0.8)]
    for kind, make in zip(KINDS, makers, strict=True):
        options = {"val": Batches(RANK, WORLD), "val_check_interval": 2}
        through = fit(Hard(), kind, f"average-{kind}", callbacks=[make()], **options)
        alone = plain(Hard(), callbacks=[make()], **{**options, "val": Batches(0, 1)})
        against = same(through, alone, average=(True, False))
        values = [float(r.trainer.callback_metrics["val_loss"]) for r in (through, alone)]
        assert abs(values[0] - values[1]) < EXACT * values[1], values
        again = fit(Hard(), kind, callbacks=[make()], ckpt_path=at(f"average-{kind}", 3), **options)
        say(f"{type(make()).__name__} {kind}: {against}; resumed {same(again, through, 3)}")
    with pytest.raises(ValueError, match="WeightAveraging"):
        fit(Hard(), callbacks=[StochasticWeightAveraging(1e-2)])
    say("StochasticWeightAveraging refused")


BACKEND = "nccl" if ACCELERATOR == "gpu" else "gloo"


class StockSharding(Hard):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for part in (*self.model.model.layers, self):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])
        register_fsdp_forward_method(self, "training_step")


@case
def directories() -> None:
    through = fit(Hard(), "sharded", "directory")
    file = at("directory", 3)
    assert is_sharded(file)
    loaded = Hard.load_from_checkpoint(file)
    if RANK == 0:
        consolidate(file)
    dist.barrier()
    single = Hard.load_from_checkpoint(f"{file}.consolidated")
    assert distance(whole(loaded.state_dict()), whole(single.state_dict())) == 0.0
    assert distance(whole(loaded.state_dict()), whole(Hard().state_dict())) > 1e-3
    say(
        f"directories load_from_checkpoint; {same(plain(Hard(), ckpt_path=f'{file}.consolidated'), through, 3, (False, True))}"
    )
    stock = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend=BACKEND)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(StockSharding(), ranks=WORLD, strategy=stock, folder=ROOT / "stock")
    again = fit(Hard(), ckpt_path=at("stock", 3))
    say(f"directory of ModelParallelStrategy: {same(again, through, 3)}")


@case
def other_meshes() -> None:
    for kind in KINDS:
        through = fit(Hard(), kind, f"hsdp-{kind}", strategy={"replicate_size": 2})
        again = fit(Hard(), kind, ckpt_path=at(f"hsdp-{kind}", 3), strategy={"offload": True})
        say(f"hsdp to offload {kind}: {same(again, through, 3)}")


class Late(Hard):
    """Weights that are loaded once training has begun."""

    def on_train_start(self) -> None:
        self.load_state_dict(torch.load(at("late", 3), weights_only=True)["state_dict"])
        self.spare.load_state_dict({"weight": torch.ones(3, 5), "bias": torch.zeros(3)})


@case
def weights_loaded_late() -> None:
    fit(Hard(), "full", "late")
    late = fit(Late(), max_epochs=1)
    fresh = fit(Hard.load_from_checkpoint(at("late", 3), weights_only=False), max_epochs=1)
    assert worst(late.losses, fresh.losses) <= EXACT
    assert torch.equal(late.parameters["spare.weight"], torch.ones(3, 5))
    say("whole weights loaded in on_train_start")


@case
def the_other_tree() -> None:
    options: dict[str, Any] = {"ranks": WORLD, "tree": pl}
    for kind in KINDS:
        made = [LigerFSDPStrategyPL(state_dict_type=kind, bf16=False) for _ in range(2)]
        through = train(HardPL(), strategy=made[0], folder=ROOT / f"pl-{kind}", **options)
        again = train(HardPL(), strategy=made[1], ckpt_path=at(f"pl-{kind}", 3), **options)
        HardPL.load_from_checkpoint(at(f"pl-{kind}", 3))
        say(f"pytorch_lightning {kind}: {same(again, through, 3)}")


@case
def after_training() -> None:
    for kind in KINDS:
        run = fit(Hard(), kind, max_epochs=1)
        path = ROOT / f"after-{kind}.ckpt"
        run.trainer.save_checkpoint(path)
        loaded = Hard.load_from_checkpoint(path)
        assert distance(whole(loaded.state_dict()), run.parameters) == 0.0
        longer = fit(Hard(), kind, ckpt_path=path)
        say(f"saved after training {kind}: {same(longer, fit(Hard(), kind), 4)}")


class Compiled(Hard):
    """Keys of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.compile(torch.nn.Linear(3, 3))


class Recomputed(Hard):
    """Wrapped by its author."""

    def configure_model(self) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        if not hasattr(self.model.model.layers[0], "_checkpoint_wrapped_module"):
            for i, layer in enumerate(self.model.model.layers):
                self.model.model.layers[i] = checkpoint_wrapper(layer)


@case
def wrapped() -> None:
    for kind in KINDS:
        through = fit(Recomputed(), kind, f"wrapped-{kind}")
        say(f"wrapped {kind}: {same(fit(Hard(), kind, ckpt_path=at(f'wrapped-{kind}', 3)), through, 3)}")
    saved = torch.load(at("wrapped-full", 3), weights_only=True)["state_dict"]
    assert list(saved) == list(Hard().state_dict())


@case
def names() -> None:
    fit(Compiled(), "full", "compiled", max_epochs=1)
    saved = torch.load(at("compiled", 3), weights_only=True)["state_dict"]
    assert list(saved) == list(Compiled().state_dict())
    renamed = {"state_dict": {n.replace("_orig_mod.", ""): v for n, v in saved.items()}}
    if RANK == 0:
        torch.save({**torch.load(at("compiled", 3), weights_only=True), **renamed}, ROOT / "renamed.ckpt")
    dist.barrier()
    fit(Compiled(), ckpt_path=ROOT / "renamed.ckpt", max_epochs=1)
    say("names are those of the module itself, with wrappers or without")


def main() -> None:
    assert adapter_cases and export_cases and failure_cases and optimizer_cases and state_cases  # have added theirs
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    chosen = set(sys.argv[3:])
    for function in CASES:
        if chosen and function.__name__ not in chosen:
            continue
        try:
            function()
        except BaseException:
            traceback.print_exc()
            sys.exit(f"failed: {function.__name__}")  # the ranks are no longer at the same place
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
