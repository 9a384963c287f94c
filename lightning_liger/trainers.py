"""What the strategy arranges in the Trainer that runs it."""

from __future__ import annotations

from typing import Any


def liger_callback(trainer: Any) -> Any:
    """The Trainer's :class:`LigerCallback`; one with default settings joins it if there is none.

    Kernels, head and padding removal come with the strategy; a callback of the user's has the say over them.
    """
    from lightning_liger.callback import LigerCallback

    for callback in trainer.callbacks:
        if isinstance(callback, LigerCallback):
            return callback
    trainer.callbacks.insert(0, LigerCallback())
    return trainer.callbacks[0]


def evaluate_without_inference_mode(trainer: Any) -> None:
    """Parameters gathered under inference mode cannot be trained afterwards; ``no_grad`` saves as much memory."""
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop.inference_mode = False


def keep_the_order_of_data(trainer: Any) -> None:
    """One rank has all of the data, and reads it in the order that its author chose: no sampler takes its place."""
    trainer._accelerator_connector.use_distributed_sampler = False
