"""How the ranks are arranged."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DATA = "data_parallel"
TENSOR = "tensor_parallel"
REPLICATE = "replicate"
SHARD = "shard"


def check_sizes(world_size: int, replicate_size: int) -> None:
    """Raise before a process group is made.

    Raises:
        ValueError: ``replicate_size`` does not divide the number of processes.
    """
    if world_size % replicate_size:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"replicate_size={replicate_size} does not divide the {world_size} processes of this job "
            f"(devices × num_nodes). Use one of {', '.join(map(str, divisors))}."
        )


def check_offload(device: torch.device) -> None:
    """Raise where shards in host memory could not be gathered, normed or saved.

    Raises:
        ValueError: the process group, made by somebody else or with a backend of the user's, has none for CPU tensors.
    """
    if "cpu" not in dist.get_backend_config() and device.type == "cuda":
        raise ValueError(
            "offload=True keeps shards in host memory, and the process group has no backend for CPU tensors. Leave "
            "process_group_backend out, or make the group with init_process_group('cpu:gloo,cuda:nccl')."
        )


def build_mesh(world_size: int, device_type: str, replicate_size: int = 1) -> DeviceMesh:
    """All ranks as one mesh, with the names that Lightning documents for ``self.device_mesh``.

    ``mesh["data_parallel"]`` holds every rank and ``mesh["tensor_parallel"]`` one, so that a ``configure_model`` written
    for ``ModelParallelStrategy`` finds what it looks for. With ``replicate_size > 1`` the data-parallel ranks are a grid
    of ``("replicate", "shard")``; neighbouring ranks share one copy, so that shards stay within a node.

    Args:
        world_size: number of processes.
        device_type: ``"cuda"`` or ``"cpu"``.
        replicate_size: how many whole copies of the model there are; 1 shards over all ranks.

    Raises:
        ValueError: ``replicate_size`` does not divide ``world_size``.
    """
    check_sizes(world_size, replicate_size)
    if replicate_size == 1:
        return init_device_mesh(device_type, (world_size, 1), mesh_dim_names=(DATA, TENSOR))
    shape = (replicate_size, world_size // replicate_size, 1)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD, TENSOR))
    mesh[REPLICATE, SHARD]._flatten(DATA)
    return mesh


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What ``fully_shard`` takes: one dimension to shard over, or two, of which the first replicates."""
    names = mesh.mesh_dim_names or ()
    return mesh[REPLICATE, SHARD] if REPLICATE in names else mesh[DATA]


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """``(number of ranks with data of their own, which of them this is)``."""
    data = mesh[DATA]
    return data.size(), data.get_local_rank()
