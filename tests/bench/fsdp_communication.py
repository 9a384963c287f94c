"""Other ways for FSDP2 to gather parameters, to be measured beside its own.

* ``pool``: buffers from NCCL's allocator, which NCCL may read and write without copying them first.
* ``symmetric``: buffers that every rank has at the same place of a symmetric memory, with NCCL's kernels for those.
* ``copy engines``: the same, and ``NCCL_CTA_POLICY=2`` in the environment of the launch: copies by the GPU's copy engines,
  which leave all multiprocessors to the matrix products.

NVLink multicast stays off in all of them: a launch has ``NCCL_NVLS_ENABLE=0`` and ``TORCH_SYMM_MEM_DISABLE_MULTICAST=1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

Way = Literal["pool", "symmetric", "copy engines"]
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def environment(way: Way | None) -> dict[str, str]:
    """What a launch needs in its environment."""
    return {**WITHOUT_MULTICAST, **({"NCCL_CTA_POLICY": "2"} if way == "copy engines" else {})}


class _AllGather:
    """For ``FSDPModule.set_custom_all_gather``."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        # under the name of torch 2.13 where there is one
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        return getattr(dist, name)(output_tensor, input_tensor, group=group, async_op=async_op)


class PoolAllGather(_AllGather):
    def __init__(self, group: Any) -> None:
        self._group = group

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        backend = self._group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            raise RuntimeError(f"{backend} allocates no tensors on {device}")
        made: Tensor = backend.allocate_tensor(int(size[0]), dtype=dtype, device=device)
        return made


class SymmetricAllGather(_AllGather):
    def __init__(self, group: Any) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._symmetric: Any = symmetric
        symmetric.set_backend("NCCL")
        dist.barrier(group=group)  # makes the communicator, which the first rendezvous needs

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.use_mem_pool(self._symmetric.get_mem_pool(device)):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._symmetric.rendezvous(output_tensor, group=group.group_name)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class GatherBy(L.Callback):
    """Has every block of a sharded module gather by one of the ways; the root is gathered once in a step."""

    def __init__(self, way: Way) -> None:
        self.way = way

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        group = trainer.strategy.device_mesh["data_parallel"].get_group()
        gather = PoolAllGather(group) if self.way == "pool" else SymmetricAllGather(group)
        blocks: list[nn.Module] = [m for m in pl_module.modules() if isinstance(m, FSDPModule) and m is not pl_module]
        for block in blocks:
            block.set_custom_all_gather(gather)  # type: ignore[operator]
