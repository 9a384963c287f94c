"""Sharded gradients in memory that the rest of a step can use once they are gone.

FSDP allocates the output of a reduce-scatter in the stream of the collective, and a caching allocator keeps what a stream
has freed for that stream: after ``zero_grad`` the gradients' memory would stand empty during the next forward, when
activations need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ReduceIntoComputeMemory:
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter`` whose output belongs to the computing stream.

    FSDP calls ``allocate`` for the input, in the stream that computes, then for the output, in its own stream, which has
    waited for the first one; so what the computing stream freed before is free for both.
    """

    def __init__(self) -> None:
        self._computing: torch.cuda.Stream | None = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return torch.empty(*size, dtype=dtype, device=device)
        current, computing = torch.cuda.current_stream(device), self._computing
        if computing is None:
            self._computing = current
            return torch.empty(*size, dtype=dtype, device=device)
        self._computing = None
        with torch.cuda.stream(computing):
            output = torch.empty(*size, dtype=dtype, device=device)
        # FSDP lets go of an output that it has only added to earlier gradients while its stream still reads it
        output.record_stream(current)
        return output

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch < 2.13
        return reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def reduce_into_compute_memory(parts: Iterable[Any]) -> None:
    """Have the groups of these modules, each of which ``fully_shard`` was called on, reduce that way."""
    reduce = ReduceIntoComputeMemory()
    for part in parts:
        part.set_custom_reduce_scatter(reduce)
