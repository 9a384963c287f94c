"""``strategy="liger_fsdp"``: FSDP2 for LightningModules that know nothing of it.

The hooks stand in the order in which a Trainer calls them; what they do is in :mod:`lightning_liger.parallel`.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch.nn as nn
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_liger.choices import ActivationCheckpointing, Auto, OptimizerStateDtype
from lightning_liger.head.apply import lazy_heads
from lightning_liger.parallel.audit import audit, explain_mixture
from lightning_liger.parallel.blocks import find_blocks
from lightning_liger.parallel.checkpoint import StateDictType
from lightning_liger.parallel.checkpointing import Checkpointing
from lightning_liger.parallel.divisible import check_settings
from lightning_liger.parallel.failures import FailureWatch
from lightning_liger.parallel.groups import compute_dtypes
from lightning_liger.parallel.leaving import leave_quietly
from lightning_liger.parallel.memory import Memory
from lightning_liger.parallel.mesh import build_mesh, check_offload, check_sizes, sharding_mesh
from lightning_liger.parallel.optimizers import move_to
from lightning_liger.parallel.shard import already_sharded, foreign_parts, restore, same_on_all_ranks, shard
from lightning_liger.parallel.shared_batches import SharedBatches
from lightning_liger.parallel.stepping import Stepping
from lightning_liger.precision import DTypes, PolicyPrecision, store_parameters
from lightning_liger.settings import check_state_dtype
from lightning_liger.trainers import evaluate_without_inference_mode, keep_the_order_of_data, liger_callback
from lightning_liger.trees import installed_trees

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
else:
    _Base = object

_TREES = {"lightning.pytorch": "LigerFSDPStrategy", "pytorch_lightning": "LigerFSDPStrategyPL"}


class _LigerFSDP(Checkpointing, Memory, Stepping, PolicyPrecision, SharedBatches, _Base):
    """Shards any LightningModule over all ranks, with fp32 master weights and bf16 compute.

    Blocks are found, the LightningModule itself is the root, and every rank trains on data of its own. Without a
    :class:`lightning_liger.LigerCallback` in the Trainer, one with default settings joins it.

    Args:
        replicate_size: number of whole copies of the model; shards are spread over the ranks of one copy. ``"nodes"``
            for one copy in each node.
        sequence_parallel_size: how many neighbouring ranks share one batch and divide its tokens among them, so that
            documents can be as many times longer (Ulysses). It divides the number of ranks of one copy, and the attention
            heads.
        bf16: compute in bf16 under ``precision="32-true"``, Lightning's default; False computes in fp32.
        reshard_after_forward: free a block's parameters after its forward and gather them again in backward; ``"auto"``
            keeps them where the memory plan of the first batch says that they fit.
        offload: keep parameters, gradients and optimizer state in host memory.
        activation_checkpointing: ``"none"``; ``"full"`` keeps only each block's inputs for backward and computes the block
            again; ``"selective"`` also keeps as much of what attention and matrix products gave as memory has room for.
        activation_offload: keep what blocks have for backward in host memory, copied while they compute and back before
            they are needed. With ``activation_checkpointing="full"`` or ``"selective"`` these are the blocks' inputs.
        weights: values for models built on the ``meta`` device: ``"auto"`` is the checkpoint that a transformers
            configuration names, else the model's own initialisation; ``"init"`` always that; or a checkpoint's path.
        prefetch: how many blocks to gather ahead; 0 leaves FSDP its own one.
        gather_in_evaluation: gather the whole model once per evaluation loop, so that ``generate()`` and passes on single
            ranks need no other rank; ``"auto"`` where memory allows.
        optimizer_state_dtype: ``"bf16"`` keeps both moments of AdamW and Adam in bf16, rounded stochastically, beside fp32
            master weights; also an option of the callback.
        state_dict_type: ``"full"`` saves an ordinary checkpoint file, which loads without this package; rank 0 needs
            host memory for all of it. ``"sharded"`` saves a directory that every rank writes its part of.
        async_save: write checkpoints while training goes on.
        exclude_frozen_parameters: leave parameters that do not train, such as the base of adapters, out of checkpoints.
        process_group_backend: ``"nccl"``, ``"gloo"``, or chosen by device.
        timeout: how long a collective may wait for another rank.

    Raises:
        ValueError: an option that does not fit the job, or a precision that the policy excludes.
    """

    def __init__(
        self,
        replicate_size: int | Literal["nodes"] = 1,
        bf16: bool = True,
        reshard_after_forward: bool | Auto = "auto",
        offload: bool = False,
        activation_checkpointing: ActivationCheckpointing = "none",
        activation_offload: bool = False,
        weights: str = "auto",
        prefetch: int = 0,
        gather_in_evaluation: bool | Auto = "auto",
        optimizer_state_dtype: OptimizerStateDtype | None = None,
        state_dict_type: StateDictType = "full",
        async_save: bool = False,
        exclude_frozen_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        sequence_parallel_size: int = 1,
    ) -> None:
        if replicate_size != "nodes" and (not isinstance(replicate_size, int) or replicate_size < 1):
            raise ValueError(f"replicate_size={replicate_size!r}: expected a positive integer or 'nodes'.")
        self.init_precision(_tree_of(self), bf16)
        super().__init__(
            save_distributed_checkpoint=state_dict_type == "sharded",
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.init_checkpointing(state_dict_type, async_save, exclude_frozen_parameters)
        self.init_memory(
            activation_checkpointing,
            reshard_after_forward,
            weights,
            prefetch,
            gather_in_evaluation,
            activation_offload,
        )
        self.init_shared_batches(sequence_parallel_size)
        check_state_dtype(optimizer_state_dtype)
        self._optimizer_state_dtype = optimizer_state_dtype
        self._replicate_size = replicate_size
        self._offload = offload
        self._watch: FailureWatch | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for a Trainer of {_tree_of(self)}; strategy='liger_fsdp' fits any Trainer>"

    @property
    def _device_kind(self) -> Any:
        return self.accelerator

    # -- when the Trainer is made ------------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        if self.root_device.type == "mps":
            raise ValueError("The liger_fsdp strategy shards over CUDA devices or CPUs; on MPS use strategy='auto'.")
        check_sizes(self.num_processes * self.num_nodes, self._replicas, self._sequence_parallel_size)

    @property
    def _replicas(self) -> int:
        return self.num_nodes if self._replicate_size == "nodes" else int(self._replicate_size)

    def _configure_launcher(self) -> None:
        # one process needs no second: notebooks and tests run it as it is
        if self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()

    def _get_process_group_backend(self) -> str:
        if self._offload and self.root_device.type == "cuda":
            # norms, checkpoints and whole values of shards in host memory are collectives of CPU tensors
            return self._process_group_backend or "cpu:gloo,cuda:nccl"
        return str(super()._get_process_group_backend())

    # -- when a run starts -------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm=True has no effect under the liger_fsdp strategy. Leave it out.")
        self._device_kind.setup_device(self.root_device)
        self._setup_distributed()
        leave_quietly()
        if self._offload:
            check_offload(self.root_device)
        if self._device_mesh is None:
            self._device_mesh = build_mesh(self.world_size, self.root_device.type, self._replicas)
        self._root._device_mesh = self._device_mesh
        self.begin_sharing()
        trainer = self._root.trainer
        if self.world_size > 1:
            self._watch = FailureWatch()
        else:
            keep_the_order_of_data(trainer)
        self.check_checkpointing(trainer)
        check_settings(liger_callback(trainer).settings, self._sequence_parallel_size)

    def setup(self, trainer: Any) -> None:
        """The module is complete, and accelerated by the callback; no optimizer has been made."""
        self._device_kind.setup(trainer)
        evaluate_without_inference_mode(trainer)
        module: nn.Module = self._root
        before = [(weakref.ref(p), name) for name, p in module.named_parameters()]
        self._shard(module)
        self.prepare_checkpointing(trainer, module)
        self.finish_sharing()
        self.barrier()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            self.finish_optimizers(before)
        self.setup_precision_plugin()

    def _shard(self, module: nn.Module) -> None:
        mesh, device = sharding_mesh(self.device_mesh), self.root_device
        dtypes: DTypes = self.precision_plugin.liger_dtypes
        dtypes = dtypes.following({d for part in foreign_parts(module) for d in compute_dtypes(part)})
        root_policy = dtypes.policy(cast_inputs=False)
        callback = liger_callback(self._root.trainer)
        report = callback.report
        report.sequence = self.divided(module, report.padding)
        values = self.values_for(self._root.trainer, module, report.note)
        values.fill_unsharded(module, device)

        def prepare(part: nn.Module) -> None:
            store_parameters(part, dtypes)
            values.fill(part, device)
            same_on_all_ranks(part, device)

        sharding = already_sharded(module, root_policy, self._offload) or shard(
            module,
            find_blocks(module, lazy_heads(module)),
            mesh,
            device,
            root_policy=root_policy,
            block_policy=dtypes.policy(cast_inputs=True),
            prepare=prepare,
            reshard_after_forward=self._reshard_after_forward is not False,
            offload=self._offload,
        )
        self.begin_stepping(sharding, self.device_mesh["data_parallel"].get_group())
        values.fill_sharded(module, device)
        self.finish_memory(module, sharding, device, report, callback.settings.verbose)
        report.sharding = audit(module, sharding, mesh)
        if dtypes.notice:
            report.note(dtypes.notice)
            if not callback.settings.verbose:
                rank_zero_info(dtypes.notice)  # whoever wants no report is still told

    # -- the end -----------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        explain_mixture(exception)
        if self._watch is not None:
            self._watch.explain(exception)

    def teardown(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self.end_stepping()
        self.end_sharing()
        super().teardown()
        if self.world_size == 1:
            # Nothing has to be gathered. On several ranks the module stays sharded, for what this Trainer does next.
            self.restore_module()

    def restore_module(self) -> None:
        """Make the module what it was before it was sharded: plain, whole parameters, on the CPU of every rank.

        All ranks must call it, and each needs host memory for the whole model. A Trainer shards the module again when
        it runs it next.
        """
        if self._root is None:
            return
        replaced = restore(self._root)
        self._root.cpu()
        for optimizer in self.optimizers:
            move_to(optimizer, replaced)


def _tree_of(strategy: Any) -> str:
    return str(type(strategy).tree)


@functools.cache
def strategy_class(tree: str) -> Any:
    """The strategy for Trainers of ``tree``: ``"lightning.pytorch"`` or ``"pytorch_lightning"``.

    Raises:
        ImportError: that package is not installed.
    """
    base = importlib.import_module(f"{tree}.strategies").ModelParallelStrategy
    return type(_TREES[tree], (_LigerFSDP, base), {"tree": tree, "__module__": __name__, "__doc__": _LigerFSDP.__doc__})


def __getattr__(name: str) -> Any:
    if name == "LigerFSDPStrategy":
        return strategy_class(installed_trees()[0].__name__)
    if name == "LigerFSDPStrategyPL":
        return strategy_class("pytorch_lightning")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
