"""What the Trainers of Hugging Face have in common, here and in TRL."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lightning_liger.bench.peers.session import Session
from lightning_liger.bench.task import Sample

ARGUMENTS: dict[str, Any] = {
    # what the plain run does not do, either
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    # rows are tokens already, in the order of the plain run
    "remove_unused_columns": False,
}


def arguments(session: Session, **given: Any) -> dict[str, Any]:
    """Of ``TrainingArguments``: the plain run's precision, learning rate and number of steps."""
    return {
        **ARGUMENTS,
        "output_dir": tempfile.mkdtemp(),
        "max_steps": 10 * session.steps,
        "learning_rate": session.task.learning_rate,
        "bf16": session.autocast,
        "use_cpu": session.device.type == "cpu",
        **given,
    }


def train(session: Session, trainer_class: Any, given: dict[str, Any], seen: Callable[[Any], list[Sample]]) -> None:
    """Train until no further step is asked for.

    Args:
        trainer_class: ``transformers.Trainer`` or a subclass.
        given: arguments of its constructor; ``args`` among them.
        seen: the samples in a list of rows, as the collate function gets them.
    """
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback

    turns = session.turns
    waiting: deque[list[Sample]] = deque()  # loaders fetch ahead of the step

    class Trainer(trainer_class):
        """In order, and its losses are kept on the device."""

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            session.saw(waiting.popleft())
            loss = super().compute_loss(*args, **kwargs)
            turns.lost(loss[0] if isinstance(loss, tuple) else loss)
            return loss

    class Steps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            session.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.step()
            control.should_training_stop = turns.stopped

    given["args"]._n_gpu = min(given["args"]._n_gpu, 1)  # several GPUs would make it a DataParallel
    model = given["model"]
    trainer = Trainer(**given, optimizers=(session.optimizer(model), None), callbacks=[Steps()])
    inner = trainer.data_collator

    def collate(rows: Any) -> Any:
        waiting.append(seen(rows))
        return inner(rows)

    trainer.data_collator = collate
    trainer.train()


def flash_attention() -> str:
    """The FlashAttention that transformers finds installed, or ``"sdpa"``."""
    from transformers.utils import import_utils

    for version in (2, 3, 4):
        if torch.cuda.is_available() and getattr(import_utils, f"is_flash_attn_{version}_available", lambda: False)():
            return f"flash_attention_{version}"
    return "sdpa"
