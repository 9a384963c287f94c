"""Whether Triton kernels can run here, and on which device candidates are tried out."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor


@functools.cache
def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU. Decided by the environment, before Triton's first import."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def trial_device() -> torch.device:
    """Where candidates are compared: the current CUDA device, or the CPU under the interpreter."""
    if interpreted() or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def why_not() -> str:
    """Why no Triton kernel can run here, or ``""``."""
    for package in ("triton", "liger_kernel"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if interpreted() or torch.cuda.is_available():
        return ""
    return "Triton kernels need a CUDA device (or TRITON_INTERPRET=1, for tests)"


def stands_aside(x: object) -> str:
    """Why a kernel must leave this input to the original code, or ``""``.

    Anything but a plain tensor (DTensor, fake, functional, quantised) has a meaning that a raw kernel does not know.
    """
    if torch.compiler.is_compiling():
        return "inside torch.compile, which fuses by itself"
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        return f"the input is a {type(x).__name__}"
    if x.device.type != "cuda" and not (interpreted() and x.device.type == "cpu"):
        return f"the input is on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"kernels are not compared in {x.dtype}"
    if x.numel() == 0:
        return "the input is empty"
    if torch._C._are_functorch_transforms_active():
        return "inside a torch.func transform"
    return ""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on this device, or None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
