"""Peak memory of a training, and whether several of them fit beside each other."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

# What a process takes from a GPU beside its tensors.
_CONTEXT = 700_000_000


class PeakMemory:
    """Bytes that training takes at its peak: allocated on the device, or resident above the process before ``fit``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self.forget()
        if device.type != "cuda":
            self._before = _status("VmRSS") or _largest()

    def forget(self) -> None:
        """Peaks until now do not count; what is still held does."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # Where the system has no such file, the peak counts from the start of the process.
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Until now."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, (_status("VmHWM") or _largest()) - self._before)


def room(device: torch.device) -> tuple[int, int]:
    """Bytes that one more process like this one would need, and bytes that are free for it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) + _CONTEXT, torch.cuda.mem_get_info(device)[0]
    return _status("VmHWM") or _largest(), _available()


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0  # unknown: one process at a time


def _status(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), 0)


def _largest() -> int:
    try:
        import resource
    except ImportError:  # Windows has no getrusage
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
