"""What a process may still have of a CUDA device's memory."""

from __future__ import annotations

import torch


def allowed_bytes(device: torch.device) -> int:
    """The device's memory, or as much as ``torch.cuda.set_per_process_memory_fraction`` leaves of it."""
    total = torch.cuda.mem_get_info(device)[1]
    return int(torch.cuda.get_per_process_memory_fraction(device) * total)


def free_bytes(device: torch.device) -> int:
    """Bytes that nobody has, and those that this process's allocator keeps for nobody; within what it is allowed."""
    free, _ = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return min(free + reserved, allowed_bytes(device)) - allocated
