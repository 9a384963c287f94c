"""What goes wrong while saving and loading: said on every rank, and nothing that was there is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from case_tools import KINDS, ROOT, at, case, fit, say
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from resuming import RANK, Hard


class Refuses:
    """Cannot be written."""

    def __reduce__(self) -> Any:
        raise OSError("no space left")


class Slow:
    """Takes its time to be written."""

    def __reduce__(self) -> Any:
        time.sleep(0.5)
        return (float, (1.0,))


class Carrying(Hard):
    objects: tuple[Any, Any, int]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        first, then, after = self.objects
        checkpoint["carried"] = first if self.trainer.global_step < after else then


def carrying(first: Any, then: Any, after: int) -> Carrying:
    """A module that puts ``first`` into its checkpoints before step ``after``, and ``then`` from there on."""
    module = Carrying()
    module.objects = (first, then, after)
    return module


@case
def a_rank_that_cannot_write() -> None:
    for kind in KINDS:
        for later in (False, True):
            folder = ROOT / f"refused-{kind}-{later}"
            keep = ModelCheckpoint(dirpath=folder, filename="it", every_n_train_steps=2, enable_version_counter=False)
            with pytest.raises(RuntimeError, match="no space left"):
                fit(
                    carrying(1.0, Refuses(), 3), kind, callbacks=[keep], enable_checkpointing=True,
                    max_epochs=1, strategy={"async_save": later},
                )  # fmt: skip
            dist.barrier()  # rank 0 cleans up
            assert [p.name for p in folder.iterdir()] == ["it.ckpt"]
            again = fit(Hard(), kind, ckpt_path=folder / "it.ckpt", weights_only=False, max_epochs=1)
            assert len(again.losses) == 2
            say(f"{kind} {'in the background' if later else ''}: a failure reaches all ranks and the last one stays")


class Watch(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[list[str]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(sorted(p.name for p in self.folder.glob("*")))


@case
def saving_behind_the_training() -> None:
    for kind in KINDS:
        folder = ROOT / f"behind-{kind}"
        watch = Watch(folder)
        keep = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=1)
        fit(
            carrying(Slow(), Slow(), 0), kind, callbacks=[watch, keep], enable_checkpointing=True, max_epochs=1,
            strategy={"async_save": True},
        )  # fmt: skip
        if RANK == 0:
            # step 3 ends before the checkpoint of step 2 is there
            assert not any("step=2.ckpt" in names for names in watch.seen[:3] if names), watch.seen
            assert sorted(p.name for p in folder.glob("*")) == ["step=4.ckpt"], list(folder.iterdir())
            assert not list(folder.glob(".*"))
        say(f"{kind}: steps go on while a checkpoint is written, which is there at the end")


@case
def what_cannot_be_loaded() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        fit(Hard(), ckpt_path=ROOT / "nowhere.ckpt")
    (ROOT / "empty").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="is a directory, but not a checkpoint"):
        fit(Hard(), ckpt_path=ROOT / "empty")
    for kind in KINDS:
        fit(Hard(), kind, f"other-{kind}", max_epochs=1)
        with pytest.raises(ValueError, match="Build the optimizer as in the run that saved it"):
            fit(OneGroup(), kind, ckpt_path=at(f"other-{kind}", 3))
        with pytest.raises(RuntimeError, match=r"size mismatch for spare\.weight"):
            fit(Hard(width=4), kind, ckpt_path=at(f"other-{kind}", 3))
    with pytest.raises(ValueError, match="expected 'full'"):
        fit(Hard(), "whole")
    with pytest.raises(ValueError, match="AsyncCheckpointIO"):
        fit(Hard(), "sharded", plugins=[AsyncCheckpointIO()])
    fit(Hard(), "full", "own-io", plugins=[AsyncCheckpointIO()], max_epochs=1)
    assert torch.load(at("own-io", 3), weights_only=True)["state_dict"]
    say("clear errors for what cannot be loaded")


class OneGroup(Hard):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())
