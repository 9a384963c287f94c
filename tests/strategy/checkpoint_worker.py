"""Phases of the checkpoint tests, on one process or two; each compares with one uninterrupted run."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import Run, leave
from resuming import EXACT, LOSSES, RANK, WORLD, Hard, distance, mean_over_ranks, train, whole, worst

from lightning_liger import LigerCallback, LigerFSDPStrategy
from lightning_liger.parallel.directories import consolidate

ROOT = Path(sys.argv[2])
PHASES: dict[str, list[Callable[[], None]]] = {"two": [], "one": [], "two_again": []}


def case(phase: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        PHASES[phase].append(function)
        return function

    return add


def sharded_run(folder: str | None = None, kind: str = "full", module: Any = None, **options: Any) -> Run:
    given = {"state_dict_type": kind, "bf16": False, **options.pop("strategy", {})}
    callbacks = [LigerCallback(verbose=False), *options.pop("callbacks", [])]
    where = None if folder is None else ROOT / folder
    strategy = LigerFSDPStrategy(**given)
    return train(module or Hard(), ranks=WORLD, strategy=strategy, folder=where, callbacks=callbacks, **options)


def plain_run(**options: Any) -> Run:
    return train(Hard(), ranks=1, strategy="auto", **options)


def same(run: Run, done: int, name: str, reference: dict[str, Any] | None = None, average: bool = True) -> None:
    """The losses from step ``done`` on, and the weights at the end, are those of the uninterrupted run."""
    reference = reference or torch.load(ROOT / "uninterrupted.pt")
    losses = mean_over_ranks(run.losses) if average else run.losses
    loss, weight = worst(losses, reference["losses"][done:]), distance(run.parameters, reference["parameters"])
    assert loss <= EXACT and weight <= EXACT, f"{name}: loss {loss:.1e} weights {weight:.1e}"
    say(f"{name}: loss {loss:.1e} weights {weight:.1e} over {len(losses)} steps")


def say(text: str) -> None:
    if RANK == 0:
        print(f"ok {text}", flush=True)


def ckpt(folder: str, step: int) -> str:
    return str(ROOT / folder / f"step={step}.ckpt")


@case("two")
def save_and_resume() -> None:
    run = sharded_run("two-full")
    losses = mean_over_ranks(run.losses)
    assert len(losses) == LOSSES
    if RANK == 0:
        torch.save({"losses": losses, "parameters": run.parameters}, ROOT / "uninterrupted.pt")
    dist.barrier()
    start = Hard().state_dict()
    assert distance({"scale": run.parameters["scale"]}, {"scale": start["scale"]}) > 1e-3
    assert torch.equal(run.parameters["spare.weight"], start["spare.weight"])
    for kind, strategy in (
        ("full", {}),
        ("sharded", {}),
        ("full", {"async_save": True}),
        ("sharded", {"async_save": True}),
    ):
        name = f"two-{kind}{'-async' if strategy else ''}"
        if name != "two-full":
            same(sharded_run(name, kind, strategy=strategy), 0, f"{name} does not disturb")
        again = sharded_run(f"{name}-again", kind, strategy=strategy, ckpt_path=ckpt(name, 3))
        same(again, 3, f"{name} resumed in mid-epoch")
        same(sharded_run(None, kind, ckpt_path=ckpt(f"{name}-again", 6)), 6, f"{name} resumed twice")


@case("two")
def ordinary_file() -> None:
    saved = torch.load(ckpt("two-full", 3), weights_only=True)
    own = Hard().state_dict()
    assert list(saved["state_dict"]) == list(own)
    assert {n: t.shape for n, t in saved["state_dict"].items()} == {n: t.shape for n, t in own.items()}
    tied = [saved["state_dict"][n] for n in ("model.lm_head.weight", "model.model.embed_tokens.weight")]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    loaded = Hard.load_from_checkpoint(ckpt("two-full", 3))
    assert distance(whole(loaded.state_dict()), whole(saved["state_dict"])) == 0.0
    say("full file is an ordinary checkpoint")
    same(plain_run(ckpt_path=ckpt("two-full", 3)), 3, "full file resumed by plain Lightning", average=False)
    plain_run(folder=ROOT / f"plain-{RANK}")
    same(sharded_run(ckpt_path=str(ROOT / "plain-0" / "step=3.ckpt")), 3, "plain Lightning's file resumed sharded")


BF16 = {"optimizer_state_dtype": "bf16"}
NEAR = 2e-3  # what rounding of moments makes of eight steps of 1e-2


@case("two")
def bf16_state() -> None:
    for kind in ("full", "sharded"):
        run = sharded_run(f"bf16-{kind}", kind, strategy=BF16)
        found = distance(run.parameters, torch.load(ROOT / "uninterrupted.pt")["parameters"])
        assert found < NEAR, found
        say(f"bf16 state, {kind}: weights {found:.1e} of those with fp32 state")


@case("one")
def bf16_state_on_one() -> None:
    """Its noise is another one there: shards are."""
    for kind in ("full", "sharded"):
        run = sharded_run(None, kind, strategy=BF16, ckpt_path=ckpt(f"bf16-{kind}", 3))
        found = distance(run.parameters, torch.load(ROOT / "uninterrupted.pt")["parameters"])
        state = run.trainer.optimizers[0].state.values()
        assert found < NEAR and {s["exp_avg_sq"].dtype for s in state} == {torch.bfloat16}, found
        say(f"bf16 state, {kind}, saved on 2 resumed on 1: weights {found:.1e}")


@case("one")
def on_one() -> None:
    for kind in ("full", "sharded"):
        run = sharded_run(f"one-{kind}", kind, ckpt_path=ckpt(f"two-{kind}", 3))
        same(run, 3, f"{kind} saved on 2 resumed on 1")
        same(sharded_run(f"fresh-{kind}", kind), 0, f"{kind} on 1")


@case("two_again")
def back_on_two() -> None:
    for kind in ("full", "sharded"):
        same(sharded_run(None, kind, ckpt_path=ckpt(f"one-{kind}", 6)), 6, f"{kind} 2 to 1 to 2")
        run = sharded_run(f"grown-{kind}", kind, ckpt_path=ckpt(f"fresh-{kind}", 3))
        same(run, 3, f"{kind} saved on 1 resumed on 2")
        file = ckpt(f"grown-{kind}", 6)
        if kind == "sharded":
            if RANK == 0:
                consolidate(file)
            dist.barrier()
            file += ".consolidated"
        same(plain_run(ckpt_path=file), 6, f"{kind} 1 to 2 to 1", average=False)


def main(phase: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    failed = []
    for function in PHASES[phase]:
        try:
            function()
        except Exception:
            failed.append(function.__name__)
            traceback.print_exc()
            break  # the ranks are no longer at the same place
    if failed:
        sys.exit(f"failed: {failed}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
