"""What `lightning-liger doctor` looks at: installed packages, and combinations of them that are known to go wrong."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "PROBLEM"


@dataclass(frozen=True)
class Check:
    """
    Attributes:
        name: what was looked at.
        status: ``"ok"``; ``"note"``: works, and something is worth knowing; ``"PROBLEM"``: will fail, or be wrong.
        found: what is there.
        remedy: what to do, for notes and problems.
    """

    name: str
    status: str
    found: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


_PYTHON = ((3, 10), (3, 13))
# distribution, module, least version, whether everything needs it
_REQUIRED = (
    ("torch", "torch", "2.11"),
    ("transformers", "transformers", "5.0"),
)
_TREES = (("lightning", "lightning", "2.6"), ("pytorch-lightning", "pytorch_lightning", "2.6"))
_KERNELS = (("triton", "triton", "3.5"), ("liger-kernel", "liger_kernel", "0.8.5"))
# distribution, least version, what it is for
_OPTIONAL = (
    ("peft", "0.17", "adapters"),
    ("deepspeed", "0.17", "ZeRO"),
    ("bitsandbytes", "0.45", "4-bit bases"),
    ("jsonargparse", "4.41", "YAML configurations"),
    ("rich", "13", "tables"),
    ("matplotlib", "3.8", "pictures of bench"),
)


def package_checks() -> Iterator[Check]:
    """Python, packages, and how they go together."""
    yield _python()
    for name, module, least in _REQUIRED:
        yield _package(name, module, least, required=True)
    trees = [_package(*tree, required=False) for tree in _TREES]
    there = [check for check in trees if check.found != "not installed"]
    yield from there
    if not there:
        yield Check("lightning", PROBLEM, "not installed", "pip install 'lightning>=2.6'")
    for name, module, least in _KERNELS:
        yield _kernel_package(name, module, least)
    yield from _combinations()
    for name, least, purpose in _OPTIONAL:
        found = version(name)
        if found is None:
            continue
        old = _less(found, least)
        remedy = f"pip install -U '{name}>={least}' ({purpose})" if old else ""
        yield Check(name, NOTE if old else OK, found, remedy)


def version(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Check:
    found = platform.python_version()
    low, high = _PYTHON
    if sys.version_info[:2] < low:
        return Check("python", PROBLEM, found, f"use Python {low[0]}.{low[1]} to {high[0]}.{high[1]}")
    if sys.version_info[:2] > high:
        return Check("python", NOTE, found, f"tested with Python {low[0]}.{low[1]} to {high[0]}.{high[1]}")
    return Check("python", OK, found)


def _package(name: str, module: str, least: str, *, required: bool) -> Check:
    found = version(name)
    if found is None:
        return Check(name, PROBLEM if required else OK, "not installed", f"pip install '{name}>={least}'")
    if _less(found, least):
        return Check(name, PROBLEM, found, f"pip install -U '{name}>={least}'")
    error = _import_error(module)
    if error:
        return Check(
            name, PROBLEM, f"{found}, which cannot be imported: {error}", f"reinstall: pip install -U '{name}'"
        )
    return Check(name, OK, found)


def _kernel_package(name: str, module: str, least: str) -> Check:
    if platform.system() != "Linux":
        return Check(name, OK, f"there is none for {platform.system()}; the pure torch code is used")
    check = _package(name, module, least, required=False)
    if check.found == "not installed":
        return Check(name, NOTE, check.found, f"{check.remedy}: without it the pure torch code is used")
    return check


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # a package built for another torch or Python fails in many ways on import
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


# -- together ----------------------------------------------------------------------------------------------------------


def _combinations() -> Iterator[Check]:
    yield from _triton_of_torch()
    yield from _attention_packages()
    yield from _two_trees()
    if version("pynvml") is not None and version("nvidia-ml-py") is None:
        yield Check(
            "pynvml", NOTE, version("pynvml") or "", "pip uninstall pynvml; pip install nvidia-ml-py (its successor)"
        )


def _triton_of_torch() -> Iterator[Check]:
    """Torch is built and tested with one version of Triton; ``torch.compile`` breaks with others."""
    have = version("triton")
    wanted = next((r for r in _requirements("torch") if re.match(r"triton\s*==", r)), None)
    if have is None or wanted is None:
        return
    pinned = re.split(r"[;,\s]", wanted.partition("==")[2].strip())[0]
    if have.split("+")[0] != pinned:
        yield Check(
            "triton with torch",
            NOTE,
            f"triton {have}, and torch {version('torch')} asks for {pinned}",
            f"pip install triton=={pinned}, if compiled layers or kernels fail",
        )


def _requirements(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _attention_packages() -> Iterator[Check]:
    from lightning_liger.padding.backends.registry import BACKENDS

    for name, module, backend in (
        ("flash-attn-4", "flash_attn.cute", "fa4"),
        ("flash-attn-3", "flash_attn_interface", "fa3"),
        ("flash-attn", "flash_attn", "fa2"),
    ):
        found = version(name)
        if found is None:
            continue
        entry = next(b for b in BACKENDS if b.name == backend)
        error = _import_error(module)
        if not error:
            yield Check(name, OK, f"{found} (attention={backend!r})")
            continue
        remedy = (
            f"{entry.install}, built for torch {version('torch')}; or uninstall it: attention='varlen' needs no package"
        )
        if name == "flash-attn-3":
            remedy = f"what PyPI calls flash-attn-3 holds no kernels: {entry.install}"
        yield Check(name, PROBLEM, f"{found}, which cannot be imported: {error}", remedy)


def _two_trees() -> Iterator[Check]:
    one, two = version("lightning"), version("pytorch-lightning")
    if one is not None and two is not None:
        yield Check(
            "lightning beside pytorch_lightning",
            NOTE,
            f"{one} and {two}",
            "their classes are unrelated: a module of the one does not run in the other's Trainer (LigerCallback runs in "
            "both)",
        )


def _less(found: str, least: str) -> bool:
    return _numbers(found) < _numbers(least)


def _numbers(text: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]+(\.[0-9]+)*", text)
    numbers = [int(n) for n in release.group().split(".")] if release else [0]
    return tuple([*numbers, 0, 0, 0][:4])


def as_dicts(checks: list[Check]) -> list[dict[str, Any]]:
    return [check.to_dict() for check in checks]
