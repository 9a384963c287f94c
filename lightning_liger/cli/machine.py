"""What `lightning-liger doctor` looks at: devices, drivers, compilers, shared memory, and the environment."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_liger.cli.checks import NOTE, OK, PROBLEM, Check, version

_SHARED_MEMORY = 1_000_000_000


def machine_checks() -> Iterator[Check]:
    """Devices first; what is looked at further depends on them."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    why = next((" ".join(str(w.message).split())[:200] for w in said if "CUDA" in str(w.message)), "")
    if there:
        yield from _devices(torch)
        yield from _compiler()
        yield from _several(torch)
    else:
        yield _no_device(torch, why)
    yield from _environment(there)
    yield from _shared_memory()


def _no_device(torch: Any, why: str) -> Check:
    mps = getattr(torch.backends, "mps", None)
    if mps is not None and mps.is_available():
        return Check("device", OK, "MPS: padding removal and the fused head run in pure torch")
    driver = _driver()
    if not driver and not Path("/dev/nvidiactl").exists():
        return Check("device", OK, "no GPU: padding removal and the fused head run on the CPU")
    if torch.version.cuda is None and torch.version.hip is None:
        found = f"an NVIDIA driver ({driver or 'no version'}), but this torch {torch.__version__} is built for CPUs"
        return Check("device", PROBLEM, found, "install a CUDA build: https://pytorch.org/get-started/locally")
    found = f"driver {driver or 'of no known version'}, torch built for CUDA {torch.version.cuda}: {why or 'no device is seen'}"
    return Check(
        "device",
        PROBLEM,
        found,
        "update the driver (nvidia-smi shows the newest CUDA that it knows), or install torch for an older CUDA; in a "
        "container, start it with --gpus all; look at CUDA_VISIBLE_DEVICES",
    )


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.split("\n")[0].strip() if result.returncode == 0 else ""


def _devices(torch: Any) -> Iterator[Check]:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    yield Check("driver", OK, f"{_driver() or 'version not known'}, torch built for {built}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        name = f"device {index}"
        major, minor = properties.major, properties.minor
        found = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, compute capability {major}.{minor}"
        architectures = torch.cuda.get_arch_list()
        known = [a for a in architectures if a.startswith(("sm_", "compute_"))]
        if known and torch.version.cuda and not _covered(major, minor, known):
            remedy = f"install a torch build that has kernels for it (this one has {', '.join(known)})"
            yield Check(name, PROBLEM, found, remedy)
        elif torch.version.cuda and major < 8:
            remedy = (
                "it has no bf16 units: expect bf16 to be slow, and padding removal to use attention='flex' or 'sdpa'"
            )
            yield Check(name, NOTE, found, remedy)
        else:
            yield Check(name, OK, found)


def _covered(major: int, minor: int, architectures: list[str]) -> bool:
    """Binaries run on later minor versions of the same generation; PTX on whatever is newer."""
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = "".join(c for c in number if c.isdigit())
        own = (int(digits[:-1]), int(digits[-1])) if len(digits) > 1 else (0, 0)
        if (kind == "sm" and own[0] == major and own[1] <= minor) or (kind == "compute" and own <= (major, minor)):
            return True
    return False


def _compiler() -> Iterator[Check]:
    """Triton compiles a small C module for each machine."""
    if version("triton") is None or platform.system() != "Linux":
        return
    compiler = os.environ.get("CC") or next((c for c in ("clang", "gcc", "cc") if shutil.which(c)), "")
    if not compiler or shutil.which(compiler.split()[0]) is None:
        found = f"CC={compiler}, which is not there" if compiler else "none"
        yield Check("C compiler", PROBLEM, found, "Triton needs one: apt-get install gcc, or set CC to its path")
        return
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        yield Check(
            "C compiler", PROBLEM, f"{compiler}, but no {header}", "Triton needs it: apt-get install python3-dev"
        )
        return
    yield Check("C compiler", OK, compiler)


def _several(torch: Any) -> Iterator[Check]:
    try:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # builds without it
        nccl = ""
        if torch.cuda.device_count() > 1:
            yield Check("NCCL", PROBLEM, f"none ({error})", "several GPUs need a torch build with NCCL")
    if nccl:
        yield Check("NCCL", OK, nccl)
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    if len(names) > 1:
        yield Check(
            "devices",
            NOTE,
            ", ".join(sorted(names)),
            "steps wait for the slowest one; choose with CUDA_VISIBLE_DEVICES",
        )
    geforce = any("RTX 40" in name or "RTX 50" in name for name in names)
    if torch.cuda.device_count() > 1 and geforce and os.environ.get("NCCL_P2P_DISABLE") != "1":
        remedy = "if the first collective hangs: export NCCL_P2P_DISABLE=1 (these cards have no direct transfers)"
        yield Check("NCCL", NOTE, "GeForce cards without direct transfers between them", remedy)


def _environment(cuda: bool) -> Iterator[Check]:
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on"):
        remedy = "unset it: kernels run in Python, thousands of times slower; it is for tests"
        yield Check("TRITON_INTERPRET", PROBLEM if cuda else NOTE, os.environ["TRITON_INTERPRET"], remedy)
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Check(
            "CUDA_LAUNCH_BLOCKING", NOTE, "1", "unset it for speed: each kernel is waited for; it is for debugging"
        )
    implementation = os.environ.get("LIGER_KERNEL_IMPL")
    if implementation:
        remedy = "kernels of Liger are then not the Triton ones that were measured; each is compared before it is used"
        yield Check("LIGER_KERNEL_IMPL", NOTE, implementation, remedy)
    elif version("nvidia-cutlass-dsl") is not None and version("liger-kernel") is not None and cuda:
        found = f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}"
        remedy = "Liger may choose its CuTe kernels over Triton's: LIGER_KERNEL_IMPL=triton keeps to those"
        yield Check("Liger's implementation", NOTE, found, remedy)


def _shared_memory() -> Iterator[Check]:
    """Workers of DataLoaders hand batches over through it; containers have 64 MB unless told otherwise."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return
    if usage.total < _SHARED_MEMORY:
        yield Check(
            "shared memory",
            NOTE,
            f"/dev/shm holds {usage.total / 1e6:.0f} MB",
            "DataLoader workers may die with a bus error: start the container with --shm-size=8g or --ipc=host",
        )
    else:
        yield Check("shared memory", OK, f"{usage.total / 1e9:.0f} GB")
