"""What goes wrong while saving and loading: said on every rank, and nothing that was there is lost."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import transformers
from case_tools import KINDS, ROOT, at, case, fit, say
from export_cases import SaveAtEnd
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from resuming import RANK, Hard, distance, whole

from lightning_liger.parallel import host


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


def slowly(kind: str, folder: Path, every: int, keep: int, later: bool = True) -> Watch:
    watch = Watch(folder)
    saving = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=every, save_top_k=keep)
    options = {"enable_checkpointing": True, "max_epochs": 1, "strategy": {"async_save": later}}
    fit(carrying(Slow(), Slow(), 0), kind, callbacks=[watch, saving], **options)
    return watch


@case
def saving_behind_the_training() -> None:
    for kind in KINDS:
        behind, waiting = ROOT / f"behind-{kind}", ROOT / f"waiting-{kind}"
        watch = slowly(kind, behind, every=2, keep=-1)
        # step 3 has ended before the checkpoint of step 2 is there
        assert not any("step=2.ckpt" in names for names in watch.seen[:3]), watch.seen
        slowly(kind, waiting, every=2, keep=-1, later=False)
        for step in (2, 4):
            files = [folder / f"step={step}.ckpt" for folder in (behind, waiting)]
            one, two = (whole(Hard.load_from_checkpoint(f, weights_only=False).state_dict()) for f in files)
            assert distance(one, two) == 0.0
        say(f"{kind}: steps go on while a checkpoint is written, which holds what was there when it was begun")


@case
def removing_behind_the_training() -> None:
    for kind in KINDS:
        watch = slowly(kind, ROOT / f"one-{kind}", every=1, keep=1)
        dist.barrier()
        if RANK == 0:
            first = next(i for i, names in enumerate(watch.seen) if names)
            assert all(watch.seen[first:]), watch.seen
            assert [p.name for p in (ROOT / f"one-{kind}").iterdir()] == ["step=4.ckpt"]
        say(f"{kind}: an old checkpoint goes once the new one is there")


@case
def more_than_host_memory() -> None:
    usual, full = ROOT / "roomy", ROOT / "crammed"
    fit(Hard(), "full", "roomy", max_epochs=1)
    free, host.available_bytes = host.available_bytes, lambda: 0
    try:
        with pytest.warns(UserWarning, match="more than the host memory") if RANK == 0 else nullcontext():
            fit(Hard(), "full", "crammed", max_epochs=1, callbacks=[SaveAtEnd(ROOT / "crammed-hf")])
    finally:
        host.available_bytes = free
    dist.barrier()
    one, two = (torch.load(f / "step=3.ckpt", weights_only=True) for f in (usual, full))
    assert distance(one["state_dict"], two["state_dict"]) == 0.0
    states = [c["optimizer_states"][0]["state"] for c in (one, two)]
    assert all(torch.equal(states[0][i][k], states[1][i][k]) for i in states[0] for k in states[0][i])
    assert [p.name for p in full.iterdir()] == ["step=3.ckpt"]
    assert transformers.AutoModelForCausalLM.from_pretrained(ROOT / "crammed-hf")
    assert not list((ROOT / "crammed-hf").glob(".*"))
    say("what does not fit into host memory goes through a file")


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
