"""Memory of one rank."""

from __future__ import annotations

import sys

import torch


def peak_memory_gb(device: torch.device) -> float:
    """Peak allocated device memory in GB (1e9 bytes); on a CPU the process's peak resident set."""
    if device.type == "cuda":
        return _peak(device, "allocated_bytes")
    try:
        import resource
    except ImportError:  # Windows has no getrusage
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def reserved_memory_gb(device: torch.device) -> float | None:
    """Peak that the caching allocator held of the device's memory, in GB; None where there is none."""
    return _peak(device, "reserved_bytes") if device.type == "cuda" else None


def _peak(device: torch.device, kind: str) -> float:
    # torch.cuda.max_memory_allocated flattens and sorts all statistics for one of them
    return float(torch.cuda.memory_stats_as_nested_dict(device)[kind]["all"]["peak"]) / 1e9
