"""What a Lightning strategy does about memory: a mixin for the strategies of both Lightning trees."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from lightning_liger.parallel.gathering import Gathering
from lightning_liger.parallel.generate import Rendezvous, ShardedGenerate, sharded_generate
from lightning_liger.parallel.materialize import Materializer
from lightning_liger.parallel.prefetch import check_depth, lists_of, set_prefetch
from lightning_liger.parallel.recompute import Recomputed, check_mode, recompute_blocks
from lightning_liger.parallel.shard import Sharding, reshard
from lightning_liger.patching import Switch

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
else:
    _Base = object


class Memory(_Base):
    """Checkpointed activations, values for ``meta``, gathering ahead, whole models in evaluation.

    Args:
        activation_checkpointing: ``"none"``; ``"full"`` keeps only the inputs of each block for backward and computes the
            block again; ``"selective"`` also keeps what attention and every second matrix product gave.
        weights: where values of modules built on the ``meta`` device come from, see :class:`Materializer`.
        prefetch: how many blocks are gathered ahead of the one that computes; 0 leaves FSDP its own one.
        gather_in_evaluation: gather the model once per evaluation loop, which makes ``generate()`` and passes on single
            ranks possible; ``"auto"`` does it when memory allows.
    """

    def init_memory(
        self, activation_checkpointing: str, weights: str, prefetch: int, gather_in_evaluation: bool | str
    ) -> None:
        """Take the options.

        Raises:
            ValueError: for one that does not exist.
        """
        check_mode(activation_checkpointing)
        check_depth(prefetch)
        if not isinstance(weights, str) or not weights:
            raise ValueError(f"weights={weights!r}: expected 'auto', 'init', or a directory or repository.")
        if gather_in_evaluation != "auto" and not isinstance(gather_in_evaluation, bool):
            raise ValueError(f"gather_in_evaluation={gather_in_evaluation!r}: expected True, False or 'auto'.")
        self._activation_checkpointing = activation_checkpointing
        self._weights = weights
        self._prefetch = prefetch
        self._gather_in_evaluation = gather_in_evaluation
        self._memory_switch = Switch(True)
        self._memory_bindings: list[Recomputed | ShardedGenerate] = []
        self._gathering: Gathering | None = None
        self._evaluating = False

    def values_for(self, trainer: Any, module: nn.Module, note: Callable[[str], None]) -> Materializer:
        """What fills the ``meta`` tensors of ``module``. A collective."""
        return Materializer(module, self._weights, note, restored=bool(getattr(trainer, "ckpt_path", None)))

    def finish_memory(
        self, module: nn.Module, sharding: Sharding, device: torch.device, note: Callable[[str], None]
    ) -> None:
        """The module is sharded; nothing has run."""
        self._memory_switch = Switch(True)
        self._gathering = Gathering(module, device)
        recomputed = recompute_blocks(
            sharding.blocks.values(), self._activation_checkpointing, self._memory_switch, note
        )
        if self._activation_checkpointing != "none" and not sharding.blocks:
            note(f"activation_checkpointing={self._activation_checkpointing!r} found no blocks to checkpoint")
        for blocks in lists_of(sharding.blocks):
            set_prefetch(blocks, self._prefetch)
        generating = sharded_generate(
            module, self._memory_switch, self._gathering, Rendezvous(self._timeout or timedelta(minutes=30)), note
        )
        self._memory_bindings = [*recomputed, *generating]

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
        self._gathering = None
        self._evaluating = False
        super().teardown()
