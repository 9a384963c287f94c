"""Clipping by norm inside of the optimizer's step, instead of in a pass over all gradients before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_liger.hooks import TrainingHooks
from lightning_liger.optim.adamw import fused_step_of
from lightning_liger.optim.report import OptimizerReport

_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_liger.", "torch.")
# of the module: what runs around the step, and may look at gradients between clipping and updating
_AROUND = ("configure_gradient_clipping", "clip_gradients", "optimizer_step")
# of the module and of callbacks: what runs while the gradients of a step are still there
_AFTER = ("on_train_batch_end", "on_before_zero_grad", "optimizer_zero_grad", "on_train_epoch_end", "on_train_end")


class ClippingInStep(TrainingHooks):
    """Hands the factor that gradients are clipped by to optimizers that this package steps for.

    Where a hook of the user's stands between clipping and the step, gradients are clipped as ever. Where one may read them
    after the step, it finds them clipped; where none does, they are let go of with the step.

    Args:
        wrap: replaces an attribute of an object until the end of the training.
    """

    def __init__(self, report: OptimizerReport, wrap: Callable[[Any, str, Any], None]) -> None:
        self._report = report
        self._wrap = wrap

    def begin_training(self, trainer: Any, module: Any) -> None:
        plugin = trainer.precision_plugin
        steps = [fused_step_of(o) for o in trainer.optimizers]
        if not any(steps) or not trainer.gradient_clip_val or why_before(trainer, module):
            return
        as_ever = plugin.clip_grad_by_norm
        leave = read_after_the_step(trainer, module)

        def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
            step = fused_step_of(optimizer)
            if step is None:
                as_ever(optimizer, clip_val)
            else:
                step.clip(float(clip_val), leave_clipped=leave)

        self._wrap(plugin, "clip_grad_by_norm", clip_grad_by_norm)
        if str(trainer.gradient_clip_algorithm or "norm").lower().endswith("norm"):
            self._report.clipping = ", clipping included"


def why_before(trainer: Any, module: Any) -> str:
    """What may look at gradients after they were clipped and before the optimizer steps, or ``""``."""
    plugin = trainer.precision_plugin
    if not module.automatic_optimization:
        return "manual optimization"
    if getattr(plugin, "scaler", None) is not None:
        return "a step that is left out when gradients overflow"
    methods = [getattr(module, name) for name in _AROUND] + [plugin.clip_gradients, plugin.clip_grad_by_norm]
    own = [str(getattr(m, "__qualname__", m)) for m in methods if not _of_a_library(m)]
    hooked = [type(o).__name__ for o in trainer.optimizers if getattr(o, "_optimizer", o)._optimizer_step_pre_hooks]
    return ", ".join(own + hooked)


def read_after_the_step(trainer: Any, module: Any) -> bool:
    """Whether a hook of the user's runs while the gradients of a step are still there."""
    hooks = [getattr(one, name, None) for one in (module, *trainer.callbacks) for name in _AFTER]
    hooks += [o.zero_grad for o in trainer.optimizers]
    posts = [h for o in trainer.optimizers for h in getattr(o, "_optimizer", o)._optimizer_step_post_hooks.values()]
    return not all(_of_a_library(h) for h in [*hooks, *posts] if h is not None)


def _of_a_library(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_LIBRARIES)
