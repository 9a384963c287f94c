"""Lightning's ``DeepSpeedStrategy`` on any device: Lightning refuses what is not CUDA, DeepSpeed's engine runs on CPUs."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy


class ZeroAnywhere(DeepSpeedStrategy):
    """Without the two checks for CUDA, and with a rank for devices that have no index."""

    def setup_environment(self) -> None:
        if torch.cuda.is_available():
            super().setup_environment()
        else:
            DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        if torch.cuda.is_available():
            super().setup_distributed()
        else:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    def _init_config_if_needed(self) -> None:
        import deepspeed

        super()._init_config_if_needed()
        if not torch.cuda.is_available() and self._initialize is None:
            self._initialize = deepspeed.initialize
            deepspeed.initialize = self._with_rank

    _initialize: Any = None

    def _with_rank(self, *, args: argparse.Namespace, **kwargs: Any) -> Any:
        """Lightning passes ``root_device.index``, which is None for a CPU."""
        return self._initialize(args=argparse.Namespace(device_rank=self.local_rank), **kwargs)

    def teardown(self) -> None:
        import deepspeed

        super().teardown()
        if self._initialize is not None:
            deepspeed.initialize, self._initialize = self._initialize, None


def zero_config(stage: int, **zero: Any) -> dict[str, Any]:
    """A DeepSpeed configuration that takes any PyTorch optimizer and keeps no small parameter whole."""
    own = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **own, **zero},
    }
