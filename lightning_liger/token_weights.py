"""The mean over tokens instead of the mean of means.

Ranks and accumulated micro-batches hold different numbers of labels, and Lightning averages their losses as if they
held as many. With ``loss_normalization="tokens"`` each gradient counts by its labels: in backward, it is multiplied by
the labels of its micro-batch; before the optimizer steps, the sum is divided by the labels of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_liger.data.ranks import data_parallel, ranks_per_batch
from lightning_liger.head.means import labels_of
from lightning_liger.hooks import TrainingHooks
from lightning_liger.report import Report
from lightning_liger.trees import is_deepspeed
from lightning_liger.zero_gradients import averaged_over, averages_ranks, cannot_scale, on_optimizer_step

# A power of two, so that it costs no rounding: gradients keep about their size until they are divided.
_UNIT = 1024.0


class TokenWeights(TrainingHooks):
    """Weighs the micro-batches of one training by their labels.

    Args:
        report: is told why losses are left as they are, if they are.
        wrap: replaces an attribute of an object until the end of the training.
    """

    def __init__(self, report: Report, wrap: Callable[[Any, str, Any], None]) -> None:
        self._report = report
        self._wrap = wrap
        self._off = False
        self._decided = False
        self._labels = 0
        self._backwards = 0

    def begin_training(self, trainer: Any, module: Any) -> None:
        """Raises ``ValueError`` for a strategy or a module whose gradients cannot be weighed."""
        _check_weighable(trainer)
        if is_deepspeed(trainer.strategy):
            engine = trainer.strategy.model
            self._wrap(engine, "step", on_optimizer_step(engine, lambda: self._factor_of_engine(trainer, engine)))
            return
        plugin = trainer.precision_plugin
        clip_gradients = plugin.clip_gradients

        def clip(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            # under manual optimization the user clips before the step that would weigh
            self.before_optimizer_step(trainer, module, optimizer)
            clip_gradients(optimizer, *args, **kwargs)

        self._wrap(plugin, "clip_gradients", clip)

    def before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        """Let the gradient of ``loss`` count by its labels.

        Raises:
            RuntimeError: a loss that cannot be weighed, after others that were.
        """
        labels = labels_of(loss)
        if not self._decided:
            self._decided = True
            # all ranks or none: a collective that every rank enters once, with its first batch
            if float(_sum(float(labels is None), trainer.strategy.root_device)):
                self._off = True
                self._report.note(
                    "loss_normalization='tokens': the loss is no plain mean of a cross entropy through the fused head; "
                    "it is left as it is"
                )
        if self._off:
            return
        if labels is None:
            raise RuntimeError(
                "loss_normalization='tokens' met a loss that is no plain mean of a cross entropy through the fused "
                "head, after batches whose loss was. Use loss_normalization='batch' for such a module."
            )
        self._labels += labels
        self._backwards += 1
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * (labels / _UNIT))

    def before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Divide what was accumulated by the labels of all micro-batches on all ranks.

        Under manual optimization the user divides losses as they like: what they accumulate is taken as a mean with
        equal weights, times a factor of theirs that is kept.
        """
        if self._off or not self._backwards or is_deepspeed(trainer.strategy):
            return
        factor = self._factor(trainer) * data_parallel(trainer.strategy)[0]
        for gradients in _by_device(optimizer):
            torch._foreach_mul_(gradients, factor.to(gradients[0].device, gradients[0].dtype))

    def _factor(self, trainer: Any) -> Tensor:
        """From the sum of weighted gradients, which Lightning or the user has divided, to their mean over labels."""
        labels = _sum(float(self._labels), trainer.strategy.root_device) / ranks_per_batch(trainer.strategy)
        automatic = trainer.lightning_module.automatic_optimization
        micro_batches = trainer.accumulate_grad_batches if automatic else self._backwards
        self._labels = self._backwards = 0
        # no label at all: the gradients are zero, or NaN as PyTorch's mean over nothing is, and stay so
        return micro_batches * _UNIT / labels.clamp_min(1.0)

    def _factor_of_engine(self, trainer: Any, engine: Any) -> Tensor | None:
        """DeepSpeed divides by the micro-batches once more, after Lightning."""
        if self._off or not self._backwards:
            return None
        ranks = data_parallel(trainer.strategy)[0] if averages_ranks(engine) else 1
        return self._factor(trainer) * ranks * averaged_over(engine)


def _check_weighable(trainer: Any) -> None:
    reason = cannot_scale(trainer.strategy.model) if is_deepspeed(trainer.strategy) else ""
    if reason:
        raise ValueError(
            f"loss_normalization='tokens' cannot weigh the gradients that DeepSpeed keeps: {reason}. Use "
            "strategy='liger_fsdp' or 'ddp', or loss_normalization='batch'."
        )
    if len(trainer.optimizers) > 1:
        raise ValueError(
            f"loss_normalization='tokens' cannot tell which of {len(trainer.optimizers)} optimizers a loss is for. Use "
            "loss_normalization='batch'."
        )


def _sum(value: float, device: torch.device) -> Tensor:
    """Over all ranks; nothing waits for the device."""
    total = torch.full((), value, dtype=torch.float32, device=device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total


def _by_device(optimizer: Any) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None:
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            groups.setdefault((local.device, local.dtype), []).append(local)
    return list(groups.values())
