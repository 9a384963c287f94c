"""Why a peer cannot be measured here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from lightning_liger.bench.messages import Ready


def not_installed(*packages: str) -> str:
    """One clause, or ``""`` where all are installed."""
    missing = []
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(package)
    if not missing:
        return ""
    return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed (pip install {' '.join(missing)})"


def needs_cuda(plain: Ready | None, what: str) -> str:
    """One clause, or ``""`` on a CUDA device."""
    return "" if plain is None or plain.kind == "cuda" else f"{what} need a CUDA device"
