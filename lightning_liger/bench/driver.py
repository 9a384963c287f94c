"""Whether a process may still be forked, as far as CUDA goes."""

from __future__ import annotations

import ctypes

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def driver_asleep() -> bool:
    """Whether nobody has initialized the CUDA driver in this process; True where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == _NOT_INITIALIZED
