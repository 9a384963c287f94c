"""What a profiler saw of one step: the kernels under each module's range, and where the device's time went."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

# Parts of kernel names, the more telling first: attention kernels are made of matrix products too.
_KINDS = (
    ("attention", ("flash", "fmha", "attn", "attention", "sdpa")),
    ("communication", ("nccl", "rccl")),
    ("matmul", ("gemm", "gemv", "nvjet", "xmma", "cutlass", "splitk", "wgmma", "cublas", "cijk", "_mm_", "matmul")),
)
_HEAD = ("_cross_entropy_kernel", "_scale_kernel", "liger_cross_entropy_kernel", "element_mul_kernel")


@dataclass
class Seen:
    """Kernels launched inside of each range, by the range's name; microseconds by kind of kernel."""

    under: dict[str, set[str]] = field(default_factory=dict)
    microseconds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.microseconds.values())

    def shares(self) -> dict[str, float]:
        """Of the device's time, the largest first."""
        parts = sorted(self.microseconds.items(), key=lambda part: -part[1])
        return {kind: time / self.total for kind, time in parts if time}


def profiler() -> Any:
    """A recorder of one step: names, times and launches; no shapes, no stacks, nothing on disk."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def is_profiling() -> bool:
    """Whether somebody's profiler runs already; there can be one."""
    return bool(torch.autograd._profiler_enabled())


def keep_trace(recorded: Any, directory: str | Path, rank: int) -> None:
    """Write the trace where TensorBoard and ``chrome://tracing`` (or Perfetto) find it."""
    torch.profiler.tensorboard_trace_handler(str(directory), worker_name=f"rank{rank}")(recorded)


def read(events: Iterable[Any], ranges: Collection[str], fused: Collection[str]) -> Seen:
    """Sort the events of a profiler.

    Args:
        ranges: names of ranges that launches are looked for in, at any depth.
        fused: parts of names of our own kernels.
    """
    names, seen = set(ranges), Seen()
    for event in events:
        if event.device_type == DeviceType.CPU:
            if not event.kernels:
                continue
            launched = [kernel.name for kernel in event.kernels]
            parent = event
            while parent is not None:
                if parent.name in names:
                    seen.under.setdefault(parent.name, set()).update(launched)
                parent = parent.cpu_parent
        elif not getattr(event, "is_user_annotation", False) and event.name not in names:
            kind = kind_of(event.name, fused)
            seen.microseconds[kind] = seen.microseconds.get(kind, 0.0) + event.time_range.elapsed_us()
    return seen


def kind_of(kernel: str, fused: Collection[str]) -> str:
    lowered = kernel.lower()
    if any(part in kernel for part in (*fused, *_HEAD)):
        return "fused kernels"
    return next((kind for kind, parts in _KINDS if any(part in lowered for part in parts)), "other")
