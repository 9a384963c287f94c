"""Memory of one rank."""

from __future__ import annotations

import sys

import torch


def peak_memory_gb(device: torch.device) -> float:
    """Peak allocated device memory in GB (1e9 bytes); on a CPU the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows has no getrusage
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def reserved_memory_gb(device: torch.device) -> float | None:
    """Peak that the caching allocator held of the device's memory, in GB; None where there is none."""
    return torch.cuda.max_memory_reserved(device) / 1e9 if device.type == "cuda" else None
