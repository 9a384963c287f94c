"""What is measured: a module, its data, and the few options of a Trainer that change what a step costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_liger.bench.task import Task

# Anything else (loggers, checkpoints, validation, several devices) would be measured along, or needs more than a step.
TRAINER_OPTIONS = (
    "accelerator",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "benchmark",
)

Build = Callable[[], Any]
"""Makes what :func:`as_job` reads. Called in a process of its own, so it must be importable or picklable."""


class NoJob(ValueError):
    """What a build function returned cannot be trained."""


@dataclass
class Job:
    """One training, made anew for every measured run.

    Attributes:
        module: a LightningModule of either tree.
        data: a LightningDataModule or training DataLoader; None if the module has one of its own.
        trainer: options of the Trainer, of which :data:`TRAINER_OPTIONS` are kept.
        options: of :class:`lightning_liger.LigerCallback`, for the variants that have one.
        task: the same training for frameworks that bring a loop of their own; None where there is none.
    """

    module: Any
    data: Any = None
    trainer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    task: Task | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.trainer, dict):
            raise NoJob(f"trainer_options must be a dict such as {{'precision': 'bf16-mixed'}}, not {self.trainer!r}.")
        # a LigerCallback among the user's callbacks says with which options its features are to be measured
        for callback in self.trainer.get("callbacks") or []:
            settings = getattr(callback, "settings", None)
            if type(callback).__name__ == "LigerCallback" and settings is not None:
                self.options = {**vars(settings), **self.options}

    @property
    def trainer_options(self) -> dict[str, Any]:
        return {k: v for k, v in self.trainer.items() if k in TRAINER_OPTIONS and v is not None}


def as_job(made: Any) -> Job:
    """What a build function returned: a module; ``(module, data)``; ``(module, data, trainer_options)``; or a :class:`Job`.

    Raises:
        NoJob: anything else.
    """
    if isinstance(made, Job):
        job = made
    elif isinstance(made, tuple) and 1 <= len(made) <= 3:
        job = Job(*made)
    else:
        job = Job(made)
    if not callable(getattr(job.module, "training_step", None)):
        raise NoJob(
            "the build function must return a LightningModule, (module, data) or (module, data, trainer_options), where "
            f"data is a LightningDataModule or a DataLoader; it returned {_described(made)}."
        )
    return job


def _described(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return f"a {type(made).__name__}"
