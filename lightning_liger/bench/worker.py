"""The process that trains: one run after the other, each from the same seed."""

from __future__ import annotations

import gc
import logging
import os
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from lightning_liger.bench.baton import Baton
from lightning_liger.bench.driver import driver_asleep
from lightning_liger.bench.job import Build, Job, as_job
from lightning_liger.bench.messages import Done, Failure, Hello, Plan
from lightning_liger.bench.turns import Turns
from lightning_liger.bench.variants import Variant


def serve(pipe: Connection, build: Build, plan: Plan, environment: Mapping[str, str]) -> None:
    """Run every :class:`Variant` that comes out of ``pipe``; None, or its end, is the end."""
    os.dup2(2, 1)  # what modules print must not stand among results
    os.environ.clear()
    os.environ.update(environment)  # a server that forks has that of its own beginning
    quiet()
    pipe.send(Hello(driver_asleep()))
    while True:
        try:
            variant = pipe.recv()
        except EOFError:
            return
        if variant is None:
            return
        turns = Turns(pipe, plan)
        run = _run_peer if variant.peer else _run
        try:
            outcome: Done | Failure = run(build, variant, plan, turns)
        except BaseException as error:
            outcome = _failure(error, turns)
        del turns
        try:
            pipe.send(outcome)
        except OSError:
            return
        _clear()


def quiet() -> None:
    """Lightning's tips and advice would drown the few lines that this is about."""
    warnings.filterwarnings("ignore", module=r"(lightning|pytorch_lightning|lightning_fabric|torch)\b.*")
    # The stand-alone packages share one hook for messages with `lightning`: whichever came last writes them.
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def tree_of(module: Any) -> Any:
    """The package, ``lightning.pytorch`` or ``pytorch_lightning``, that a LightningModule belongs to."""
    if any(kind.__module__.startswith("pytorch_lightning.") for kind in type(module).__mro__):
        import pytorch_lightning

        return pytorch_lightning
    import lightning.pytorch

    return lightning.pytorch


def _run(build: Build, variant: Variant, plan: Plan, turns: Turns) -> Done | Failure:
    import lightning.pytorch

    lightning.pytorch.seed_everything(plan.seed, verbose=False)
    job = as_job(build())
    trainer, callback = _trainer(job, variant, plan, turns)
    quiet()  # once more: importing sets loggers back
    trainer.fit(job.module, job.data)
    if not turns.stopped:
        return Failure(f"training ended by itself after {trainer.global_step} steps; {plan.most_steps} are needed")
    if callback is None:
        return Done(turns.peak_memory())
    report = callback.report
    settings = {k: v for k, v in vars(callback.settings).items() if not callable(v)}
    return Done(turns.peak_memory(), settings, report.to_dict(), tuple(report.reasons()))


def _run_peer(build: Build, variant: Variant, plan: Plan, turns: Turns) -> Done | Failure:
    from lightning_liger.bench import peers
    from lightning_liger.bench.peers.session import Session

    task = as_job(build()).task
    if task is None:
        return Failure("this job has no task that others could train")
    peers.run(variant, Session(task, plan, turns))
    return Done(turns.peak_memory()) if turns.stopped else Failure("training ended by itself")


def _trainer(job: Job, variant: Variant, plan: Plan, turns: Turns) -> tuple[Any, Any]:
    from lightning_liger import LigerCallback

    callback = None if variant.options is None else LigerCallback(**variant.options_for(job.options))
    trainer = tree_of(job.module).Trainer(
        **{
            "accelerator": "auto",
            **job.trainer_options,
            **plan.trainer,
            "strategy": variant.strategy,
            "devices": 1,
            "callbacks": [*([] if callback is None else [callback]), Baton(turns)],
            # more than will be made: modules with several optimizers count each of their steps
            "max_steps": 10 * plan.most_steps,
            "max_epochs": -1,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
    )
    return trainer, callback


def is_memory(error: BaseException) -> bool:
    """Whether an error says that memory is used up."""
    text = " ".join(str(error).split())
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in text for words in ("out of memory", "can't allocate memory", "CUDNN_STATUS_ALLOC_FAILED")
    )


def _failure(error: BaseException, turns: Turns) -> Failure:
    text = " ".join(str(error).split())
    memory = is_memory(error)
    trace = "".join(traceback.format_exception(error))
    traceback.clear_frames(error.__traceback__)
    with suppress(Exception):  # a device that has crashed cannot be read any more
        turns.failed()
    what = "out of memory" if memory else f"{type(error).__name__}: {text[:300]}"
    return Failure(what, memory, turns.largest, "" if memory else trace)


def _clear() -> None:
    """Give back what the run held, so that the next one begins as the first did."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
