"""What a Lightning strategy does about memory: a mixin for the strategies of both Lightning trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from lightning_liger.parallel.allocator import close_gaps
from lightning_liger.parallel.gathering import Gathering
from lightning_liger.parallel.generate import Rendezvous, ShardedGenerate, sharded_generate
from lightning_liger.parallel.gradients import reads_old_gradients
from lightning_liger.parallel.materialize import Materializer
from lightning_liger.parallel.memory_plan import MemoryPlan
from lightning_liger.parallel.mesh import sharding_mesh
from lightning_liger.parallel.offloading import ActivationOffload, offload_activations
from lightning_liger.parallel.planning import plan_memory
from lightning_liger.parallel.prefetch import check_depth, lists_of, set_prefetch
from lightning_liger.parallel.recompute import Recomputed, check_mode, recompute_blocks
from lightning_liger.parallel.shard import Sharding, reshard
from lightning_liger.patching import Switch
from lightning_liger.printing import printable
from lightning_liger.report import Report

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
else:
    _Base = object


# Blocks stay gathered for backward only where this much of the device is expected to suffice: an estimate that is too
# low must not cost a run its memory.
_KEEP_BELOW = 0.75


class Memory(_Base):
    """Checkpointed activations, values for ``meta``, gathering ahead, whole models in evaluation.

    Args:
        activation_checkpointing: ``"none"``; ``"full"`` keeps only the inputs of each block for backward and computes the
            block again; ``"selective"`` also keeps as much of what attention and matrix products gave as memory has room
            for (:mod:`lightning_liger.parallel.selecting`).
        weights: where values of modules built on the ``meta`` device come from, see :class:`Materializer`.
        activation_offload: keep what blocks have for backward in host memory
            (:mod:`lightning_liger.parallel.offloading`).
        prefetch: how many blocks are gathered ahead of the one that computes; 0 leaves FSDP its own one.
        gather_in_evaluation: gather the model once per evaluation loop, which makes ``generate()`` and passes on single
            ranks possible; ``"auto"`` does it when memory allows.
    """

    _offload: bool

    def init_memory(
        self,
        activation_checkpointing: str,
        reshard_after_forward: bool | str,
        weights: str,
        prefetch: int,
        gather_in_evaluation: bool | str,
        activation_offload: bool = False,
    ) -> None:
        """Take the options.

        Raises:
            ValueError: for one that does not exist.
        """
        check_mode(activation_checkpointing)
        check_depth(prefetch)
        if reshard_after_forward not in (True, False, "auto"):
            raise ValueError(f"reshard_after_forward={reshard_after_forward!r}: expected True, False or 'auto'.")
        if not isinstance(weights, str) or not weights:
            raise ValueError(f"weights={weights!r}: expected 'auto', 'init', or a directory or repository.")
        if gather_in_evaluation != "auto" and not isinstance(gather_in_evaluation, bool):
            raise ValueError(f"gather_in_evaluation={gather_in_evaluation!r}: expected True, False or 'auto'.")
        if not isinstance(activation_offload, bool):
            raise ValueError(f"activation_offload={activation_offload!r}: expected True or False.")
        self._activation_checkpointing = activation_checkpointing
        self._activation_offload = activation_offload
        self._activations_on_host: ActivationOffload | None = None
        self._reshard_after_forward = reshard_after_forward
        self._weights = weights
        self._prefetch = prefetch
        self._gather_in_evaluation = gather_in_evaluation
        self._memory_switch = Switch(True)
        self._memory_bindings: list[Recomputed | ShardedGenerate] = []
        self._gathering: Gathering | None = None
        self._evaluating = False
        self._planned = False
        self._sharding_to_plan: tuple[Sharding, Report, bool] | None = None

    def values_for(self, trainer: Any, module: nn.Module, note: Callable[[str], None]) -> Materializer:
        """What fills the ``meta`` tensors of ``module``. A collective."""
        return Materializer(module, self._weights, note, restored=bool(getattr(trainer, "ckpt_path", None)))

    def finish_memory(
        self, module: nn.Module, sharding: Sharding, device: torch.device, report: Report, verbose: bool
    ) -> None:
        """The module is sharded; nothing has run."""
        note = report.note
        self._memory_switch = Switch(True)
        self._planned, self._sharding_to_plan = False, (sharding, report, verbose)
        self._gathering = Gathering(module, device)
        recomputed = recompute_blocks(
            sharding.blocks.values(), self._activation_checkpointing, self._memory_switch, note
        )
        if self._activation_checkpointing != "none" and not sharding.blocks:
            note(f"activation_checkpointing={self._activation_checkpointing!r} found no blocks to checkpoint")
        for blocks in lists_of(sharding.blocks):
            set_prefetch(blocks, self._prefetch)
        if self._activation_offload:
            self._activations_on_host = offload_activations(list(sharding.blocks.values()), device, note)
        generating = sharded_generate(
            module, self._memory_switch, self._gathering, Rendezvous(self._timeout or timedelta(minutes=30)), note
        )
        self._memory_bindings = [*recomputed, *generating]

    # -- training ----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Plan for the first batch, before it runs. A collective, once."""
        if self._activations_on_host is not None:
            self._activations_on_host.check()
        if self._planned or self._sharding_to_plan is None:
            return
        self._planned = True
        sharding, report, verbose = self._sharding_to_plan
        assert self.lightning_module is not None and self.device_mesh is not None
        trainer: Any = self.lightning_module.trainer
        mesh = sharding_mesh(self.device_mesh)
        plan: MemoryPlan | None = None
        try:
            plan = plan_memory(
                self.lightning_module,
                sharding,
                self.optimizers,
                batch,
                self.root_device,
                packed=report.padding.applied > 0,
                fused_head=report.head.applied > 0,
                checkpointing=self._activation_checkpointing,
                offload=self._offload,
                keeps_blocks=self._reshard_after_forward is False,
                offloads_activations=self._activation_offload,
                prefetch=self._prefetch,
                accumulates=trainer.accumulate_grad_batches > 1,
                frees_gradients=self.lightning_module.automatic_optimization and not reads_old_gradients(trainer),
                ranks=mesh.size(mesh.ndim - 1),
                slices=1 if report.sequence is None else report.sequence.ranks,
            )
        except Exception as error:
            # a plan is advice: what it cannot read must not end a training run
            report.note(f"no memory plan: {type(error).__name__}: {error}")
        if self._activation_checkpointing == "selective":
            plan = self._select(plan)
        if self._reshard_after_forward == "auto":
            plan = self._keep_if_it_fits(sharding, plan)
        if plan is None:
            return
        if close_gaps(plan.peak / max(plan.capacity, 1), self.root_device):
            report.note("device memory is nearly used up: the allocator's segments grow (expandable_segments)")
        report.memory = plan.to_dict()
        if verbose and self.global_rank == 0:
            tqdm.write(printable(plan.render()))

    def _select(self, plan: MemoryPlan | None) -> MemoryPlan | None:
        """Have every block keep what there is room for, by the rank with the least of it. A collective."""
        selection = None if plan is None else plan.selection
        room = torch.tensor(-1 if selection is None else selection.room, device=self.root_device)
        dist.all_reduce(room, dist.ReduceOp.MIN)
        if plan is None or selection is None or room.item() < 0:
            return plan
        plan = replace(plan, chosen=replace(selection, room=int(room.item())))
        bindings = [b for b in self._memory_bindings if isinstance(b, Recomputed)]
        for position, binding in enumerate(bindings):
            binding.select(plan.selection, position, plan.activations.tokens)
        return plan

    def _keep_if_it_fits(self, sharding: Sharding, plan: MemoryPlan | None) -> MemoryPlan | None:
        """Leave blocks gathered between forward and backward, if every rank has the memory. A collective."""
        keeping = None if plan is None else replace(plan, state=replace(plan.state, keeps_blocks=True))
        fits = keeping is not None and keeping.activations.counted and keeping.peak <= _KEEP_BELOW * keeping.capacity
        answer = torch.tensor(float(fits), device=self.root_device)
        dist.all_reduce(answer, dist.ReduceOp.MIN)
        if not answer.item():
            return plan
        for block in sharding.blocks.values():
            assert isinstance(block, FSDPModule)
            block.set_reshard_after_forward(False, recurse=False)
        return keeping

    # -- evaluation --------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        self._begin_evaluation()

    def on_test_start(self) -> None:
        self._begin_evaluation()

    def on_predict_start(self) -> None:
        self._begin_evaluation()

    def on_validation_end(self) -> None:
        self._end_evaluation()

    def on_test_end(self) -> None:
        self._end_evaluation()

    def on_predict_end(self) -> None:
        self._end_evaluation()

    def _begin_evaluation(self) -> None:
        """Gather for the whole loop, if that is wanted and possible. A collective."""
        gathering = self._gathering
        if gathering is None or self._evaluating or self._gather_in_evaluation is False:
            return
        if self._gather_in_evaluation is True or gathering.fits():
            self._evaluating = True
            gathering.enter()

    def _end_evaluation(self) -> None:
        if self._evaluating and self._gathering is not None:
            self._evaluating = False
            self._gathering.exit()
        assert self.lightning_module is not None
        reshard(self.lightning_module)

    # -- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """The run is over, or has failed: no method of the module stays replaced."""
        self._memory_switch.on = False
        for binding in reversed(self._memory_bindings):
            binding.unbind()
        self._memory_bindings = []
        if self._activations_on_host is not None:
            self._activations_on_host.close()
        self._activations_on_host = None
        self._gathering = self._sharding_to_plan = None
        self._evaluating = False
        super().teardown()
