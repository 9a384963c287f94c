"""Ranks that share one batch: a mixin for the strategies of both Lightning trees.

With ``sequence_parallel_size=k`` the tokens of one batch are divided among ``k`` neighbouring ranks. All of them run the
user's whole ``training_step`` on that batch, so that to the user's code, and to Lightning, there are ``world / k`` ranks:
that many read data, and that many are logged, gathered and averaged over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_liger.hooks import TrainingHooks
from lightning_liger.parallel.divisible import SequenceReport, check_divisible
from lightning_liger.parallel.mesh import BATCH, DATA, SEQUENCE, sequence_mesh
from lightning_liger.parallel.same_batch import SameBatch
from lightning_liger.parallel.turns import Turns, take_turns
from lightning_liger.parallel.user_samplers import divide_by_groups
from lightning_liger.report import PaddingReport
from lightning_liger.sequence import SequenceGroup
from lightning_liger.trainers import liger_callback

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
else:
    _Base = object


class SharedRandomness(TrainingHooks):
    """Loaders of a group draw the same order in every epoch, whatever one of its ranks has drawn besides."""

    def begin_epoch(self, trainer: Any, module: Any) -> None:
        trainer.strategy.share_randomness()


class SharedBatches(_Base):
    """Samplers, reductions and metrics by group, and the assurance that a group has one batch.

    Args:
        sequence_parallel_size: how many ranks share a batch.
    """

    _sequence_mesh: DeviceMesh | None = None
    _same_batch: SameBatch | None = None

    def init_shared_batches(self, sequence_parallel_size: int) -> None:
        """Take the option.

        Raises:
            ValueError: it is no positive integer.
        """
        size = sequence_parallel_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"sequence_parallel_size={size!r}: expected a positive integer, such as 2.")
        self._sequence_parallel_size = size
        self._metrics: list[Any] = []

    def begin_sharing(self) -> None:
        """The process group is there. A collective."""
        if self._sequence_parallel_size > 1 and self._sequence_mesh is None:
            self._sequence_mesh = sequence_mesh(self.world_size, self.root_device.type, self._sequence_parallel_size)
        if self._sequence_mesh is not None:
            self._same_batch = SameBatch(self.root_device, self._sequence_mesh[SEQUENCE].mesh.tolist())

    def divided(self, module: nn.Module, padding: PaddingReport) -> SequenceReport | None:
        """What is divided in ``module``, which is accelerated; None if nothing is.

        Raises:
            ValueError: it cannot be.
        """
        if self._sequence_mesh is None or not self._shares:
            return None
        groups, ranks = self._sequence_mesh.size(0), self._sequence_mesh.size(1)
        return check_divisible(module, padding, ranks, groups)

    def finish_sharing(self) -> None:
        """The module is complete; no loader has been iterated over. A collective."""
        if self._same_batch is None or self._groups is None:
            return
        self._same_batch.share_randomness()
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            # of torchmetrics, which would count the batch of a group once for each rank of it
            if hasattr(module, "process_group") and hasattr(module, "dist_sync_fn") and module.process_group is None:
                module.process_group = self._groups
                self._metrics.append(module)

    def share_randomness(self) -> None:
        """Before a loader draws the order of an epoch. A collective of each group; nothing without groups."""
        if self._same_batch is not None and self._shares:
            self._same_batch.share_randomness()

    def end_sharing(self) -> None:
        for metric in self._metrics:
            metric.process_group = None
        self._metrics = []
        self._same_batch = None

    # -- who has which data --------------------------------------------------------------------------------------------

    @property
    def _shares(self) -> bool:
        """Whether ranks of a group work on one batch now. Prediction is not divided, and every rank has its own."""
        module = self.lightning_module
        return self._sequence_mesh is not None and not (module is not None and module.trainer.predicting)

    @property
    def sequence_group(self) -> SequenceGroup | None:
        """The ranks that divide the tokens of this rank's batches; None if each rank has its own."""
        mesh = self._sequence_mesh
        return SequenceGroup.of(mesh[SEQUENCE].get_group()) if mesh is not None and self._shares else None

    @property
    def _groups(self) -> dist.ProcessGroup | None:
        """One rank of each group of ranks that share a batch, this one among them; None for all ranks."""
        return self._sequence_mesh[BATCH].get_group() if self._sequence_mesh is not None and self._shares else None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        assert self.device_mesh is not None
        mesh = (
            self._sequence_mesh[BATCH] if self._sequence_mesh is not None and self._shares else self.device_mesh[DATA]
        )
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if self._shares and self._same_batch is not None:
            divide_by_groups(dataloader, self.world_size, self.global_rank, **self.distributed_sampler_kwargs)
            take_turns(dataloader, Turns(self._same_batch, lambda: self._note_turns(dataloader)))
        return dataloader

    def _note_turns(self, loader: Any) -> None:
        assert self.lightning_module is not None
        liger_callback(self.lightning_module.trainer).report.note(
            f"{type(loader.dataset).__name__} divides itself among all ranks: those that share a batch read it by turns"
        )

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._same_batch is not None and self._shares:
            assert self.lightning_module is not None
            self._same_batch.check(batch, self.lightning_module.trainer)
        return super().batch_to_device(batch, device, dataloader_idx)

    # -- what is averaged and gathered over ranks ----------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(tensor, self._over(group), reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        return super().all_gather(tensor, self._over(group), sync_grads)

    def _over(self, group: Any | None) -> Any | None:
        everyone = group is None or group is dist.group.WORLD  # which LightningModule.all_gather puts in for none
        return self._groups if everyone else group

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._sequence_mesh is None:
            return super().reduce_boolean_decision(decision, all)
        votes = torch.tensor(int(decision), device=self.root_device)  # of every rank, not one for each group
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)
