"""How a Lightning strategy trains a sharded module: a mixin for the strategies of both Lightning trees."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from lightning_liger.choices import OptimizerStateDtype
from lightning_liger.optim.adamw import fused_step_of
from lightning_liger.optim.taking import take_over
from lightning_liger.parallel.audit import check_managed
from lightning_liger.parallel.gradients import (
    UnshardedGradients,
    free_old_gradients,
    no_gradient_sync,
    reduce_after_backward,
)
from lightning_liger.parallel.groups import sharded_parts
from lightning_liger.parallel.optimizer_trial import check_takes_shards
from lightning_liger.parallel.optimizers import no_mixed_lists, replace_stale, use_fused
from lightning_liger.parallel.shard import Sharding, reshard
from lightning_liger.trainers import liger_callback

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
else:
    _Base = object

Before = list[tuple["weakref.ref[nn.Parameter]", str]]


class Stepping(_Base):
    """Optimizers over shards, gradients that are reduced once, and nothing gathered that is out of date."""

    _optimizer_state_dtype: OptimizerStateDtype | None = None
    _sharding = Sharding()
    _unsharded_gradients: UnshardedGradients | None = None
    _parts: Sequence[FSDPModule] = ()
    _inside_manual_step = False
    _stepped = False  # an optimizer has, and nothing has run since

    @property
    def _root(self) -> Any:
        return self.lightning_module

    def begin_stepping(self, sharding: Sharding, data: dist.ProcessGroup) -> None:
        """The module is sharded; no optimizer has been made."""
        self._sharding = sharding
        self._unsharded_gradients = UnshardedGradients(sharding.whole.values(), data)

    def end_stepping(self) -> None:
        self._parts = ()
        if self._unsharded_gradients is not None:
            self._unsharded_gradients.remove()

    def setup_optimizers(self, trainer: Any) -> None:
        reshard(self._root)
        super().setup_optimizers(trainer)

    def finish_optimizers(self, before: Before) -> None:
        """Let optimizers update the shards.

        Args:
            before: every parameter, and its name, as it was before the module was sharded.

        Raises:
            ValueError: an optimizer that cannot.
        """
        named = dict(self._root.named_parameters())
        current = {id(p): named[name] for reference, name in before if (p := reference()) is not None and name in named}
        replace_stale(self.optimizers, current)
        callback = liger_callback(self._root.trainer)
        chosen = self._optimizer_state_dtype or callback.settings.optimizer_state_dtype
        take_over(self.optimizers, chosen, callback.settings.fused_optimizer, callback.report.optimizer, sharded=True)
        for optimizer in self.optimizers:
            if fused_step_of(optimizer) is None:
                use_fused(optimizer)
                no_mixed_lists(optimizer)
                check_takes_shards(optimizer)
            # what is gathered when an optimizer steps holds the values of before
            optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _after_step(self) -> None:
        self._stepped = True
        self._refresh()

    def on_train_start(self) -> None:
        reshard(self._root)
        check_managed(self._root, self._sharding)
        self._parts = list(sharded_parts(self._root))  # a walk over all modules is too slow for every step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._root.automatic_optimization:
            if self._stepped:
                self._stepped = False
                free_old_gradients(self._root.trainer)
            return super().training_step(*args, **kwargs)
        self._inside_manual_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._inside_manual_step = False
            reshard(self._root)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        reduce_after_backward(self._root, closure_loss)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        if self._inside_manual_step:
            self._refresh()

    def _refresh(self) -> None:
        """Let go of gathered parameters; the module's own are gathered again for what follows in a manual step."""
        for part in self._parts or sharded_parts(self._root):
            part.reshard()
        if self._inside_manual_step and self._root._parameters and self._sharding.entry is not None:
            self._sharding.entry.gather()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with no_gradient_sync(self._root, self._unsharded_gradients):
            yield
