"""When gradients travel between ranks, and how those do that FSDP does not manage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from lightning_liger.parallel.groups import finish_backward, sharded_parts

# whose hooks are known not to look at gradients before they are zeroed
_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_liger.", "torch.")


class UnshardedGradients:
    """Averages the gradients of whole parameters over ranks, in fp32, once per backward that synchronises.

    FSDP cannot shard a parameter without dimensions (a temperature, a loss weight); each rank holds all of it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.synchronise = True
        self._group = group
        self._handles = [p.register_post_accumulate_grad_hook(self._average) for p in parameters if p.requires_grad]

    def _average(self, parameter: torch.Tensor) -> None:
        if self.synchronise and parameter.grad is not None:
            total = parameter.grad.float() / dist.get_world_size(self._group)
            dist.all_reduce(total, group=self._group)
            parameter.grad.copy_(total)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def reduce_after_backward(root: nn.Module, loss: torch.Tensor) -> None:
    """Have the root's gradients reduced at the end of the backward that ``loss`` begins, whoever calls it.

    FSDP2 learns of a backward from what a forward returned. With manual optimization the backward runs inside of the
    root's forward, and a module without blocks has no other: it would never train.
    """
    if isinstance(root, FSDPModule) and loss.requires_grad:
        loss.register_hook(lambda _: finish_backward(root))


@contextmanager
def no_gradient_sync(module: nn.Module, unsharded: UnshardedGradients | None) -> Iterator[None]:
    """Backward passes in this context add up on each rank; the next one outside of it reduces the sum, once."""
    _set(module, unsharded, False)
    try:
        yield
    finally:
        _set(module, unsharded, True)


def free_old_gradients(trainer: Any) -> None:
    """Let go of the gradients that the last optimizer step used, before the forward that follows it.

    Lightning does so between forward and backward, so that they would be in memory beside all activations. Hooks that may
    read them until then (``on_before_zero_grad``, ``optimizer_zero_grad``) keep them there.
    """
    loop = trainer.fit_loop.epoch_loop
    is_first = loop.batch_idx % trainer.accumulate_grad_batches == 0
    if not is_first or loop.automatic_optimization._skip_backward or reads_old_gradients(trainer):
        return
    for optimizer in trainer.strategy.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def reads_old_gradients(trainer: Any) -> bool:
    """Whether a hook of the user's stands between the forward and the end of the gradients before it."""
    module, optimizers = trainer.lightning_module, trainer.strategy.optimizers
    readers = [module.optimizer_zero_grad, *(o.zero_grad for o in optimizers)]
    readers += [one.on_before_zero_grad for one in (module, *trainer.callbacks)]
    return not all(reader.__module__.startswith(_LIBRARIES) for reader in readers)


def _set(module: nn.Module, unsharded: UnshardedGradients | None, synchronise: bool) -> None:
    for part in sharded_parts(module):
        part.set_requires_gradient_sync(synchronise, recurse=False)
    if unsharded is not None:
        unsharded.synchronise = synchronise
