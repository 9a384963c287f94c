"""How the ranks are arranged."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DATA = "data_parallel"
TENSOR = "tensor_parallel"
REPLICATE = "replicate"
SHARD = "shard"
BATCH = "batch"
SEQUENCE = "sequence"


def check_sizes(world_size: int, replicate_size: int, sequence_parallel_size: int = 1) -> None:
    """Raise before a process group is made.

    Raises:
        ValueError: ``replicate_size`` or ``sequence_parallel_size`` does not divide the number of processes, or a copy of
            the model would hold a part of a group that shares a batch.
    """
    for name, size in (("replicate_size", replicate_size), ("sequence_parallel_size", sequence_parallel_size)):
        if world_size % size:
            raise ValueError(
                f"{name}={size} does not divide the {world_size} processes of this job (devices × num_nodes). "
                f"Use one of {_divisors(world_size)}."
            )
    copy = world_size // replicate_size
    if copy % sequence_parallel_size:
        raise ValueError(
            f"sequence_parallel_size={sequence_parallel_size} does not divide the {copy} processes that hold one copy of "
            f"the model (replicate_size={replicate_size} of {world_size}). Use one of {_divisors(copy)}, or fewer copies."
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


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


def sequence_mesh(world_size: int, device_type: str, sequence_parallel_size: int) -> DeviceMesh:
    """The same ranks as a grid of ``("batch", "sequence")``: a row shares one batch, whose tokens it divides.

    Neighbouring ranks form a row, so that what its attention exchanges stays within a node. Parameters are sharded over
    all ranks, whatever they compute: this grid is beside :func:`build_mesh`'s, and no part of it.
    """
    shape = (world_size // sequence_parallel_size, sequence_parallel_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=(BATCH, SEQUENCE))
