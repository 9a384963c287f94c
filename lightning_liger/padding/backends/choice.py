"""Which backend computes a layer's attention: by device, dtype, what the layer asks for, and how long documents are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_liger.padding.backends.errors import BackendError
from lightning_liger.padding.backends.features import Features
from lightning_liger.padding.backends.proof import prove, small
from lightning_liger.padding.backends.registry import BACKENDS, Backend, by_name
from lightning_liger.padding.layout import Layout

# Measured on an H200, T = 16,384, forward and backward, FlashAttention 2 against 4 in TFLOP/s: heads of 64, documents
# of 512: 48 and 75; of 4,096: 215 and 398; heads of 128, documents of 512: 99 and 140.
_LONG = 32768
_FOR_LONG = ("fa4", "fa3", "fa2", "varlen", "flex", "sdpa")
_FOR_SHORT = ("fa2", "varlen", "fa4", "fa3", "flex", "sdpa")
# FlexAttention compiles for some seconds, which fp32 runs, small and exact ones mostly, do not earn back.
_FOR_FP32 = ("sdpa", "flex")

Drop = Callable[[str], None]
_PROVED: dict[tuple[str, Features, torch.device], str] = {}
_CHOSEN: dict[tuple[str, Features, bool, torch.device], tuple[Backend, tuple[str, ...]]] = {}


def mean_length(layout: Layout) -> float:
    return layout.tokens / len(layout.lengths)


def choose(asked: str, features: Features, layout: Layout, device: torch.device, drop: Drop) -> Backend:
    """The backend for one layer of one call.

    Args:
        asked: the ``attention`` option, ``"auto"`` or a name.
        drop: told why a backend that could have done it failed its proof.

    Raises:
        BackendError: the backend asked for by name cannot do it, or fails its proof.
    """
    long = mean_length(layout) * features.head_size >= _LONG
    key = (asked, features, long, device)
    if key not in _CHOSEN:
        _CHOSEN[key] = _choose(asked, features, long, device)
    backend, dropped = _CHOSEN[key]
    for reason in dropped:
        drop(reason)
    return backend


def _choose(asked: str, features: Features, long: bool, device: torch.device) -> tuple[Backend, tuple[str, ...]]:
    if asked != "auto":
        backend = by_name(asked)
        reason = backend.unavailable() or backend.cannot(features) or proved(backend, features, device)
        if reason:
            raise BackendError(refusal(backend, reason))
        return backend, ()
    order = _FOR_FP32 if features.dtype not in (torch.float16, torch.bfloat16) else _FOR_LONG if long else _FOR_SHORT
    dropped: list[str] = []
    for backend in map(by_name, order):
        if backend.unavailable() or backend.cannot(features):
            continue
        reason = proved(backend, features, device)
        if not reason:
            if backend.run is None and features.device == "cuda" and order is not _FOR_FP32:
                why = by_name("flex").unavailable() or by_name("flex").cannot(features)
                dropped.append(f"attention runs once per document, which is slow: {why or 'no kernel passed'}")
            return backend, tuple(dropped)
        dropped.append(f"attention backend {backend.name!r} is not used: {reason}")
    raise AssertionError("the model's own attention can always be used")


def proved(backend: Backend, features: Features, device: torch.device) -> str:
    """Why the backend failed its proof, or ``""``; made once per backend, device and kind of layer."""
    if backend.run is None:
        return ""
    key = (backend.name, small(features), device)
    if key not in _PROVED:
        _PROVED[key] = prove(backend, features, device)
    return _PROVED[key]


def check_named(asked: str, wants: frozenset[str], head_size: int | None, model: str) -> None:
    """Before training: whether the backend asked for by name is there, and can do what a model's layers ask for.

    What only a call can tell (device, dtype, head sizes that the configuration does not name) is checked in the first.

    Raises:
        ValueError: naming the option, the reason and the remedy.
    """
    if asked == "auto":
        return
    backend = by_name(asked)
    reason = backend.unavailable()
    if not reason and (missing := backend.lacks(wants) or backend.wrong_size(head_size or 0)):
        reason = f"{model} needs more: {missing}"
    if reason:
        raise ValueError(refusal(backend, reason))


def refusal(backend: Backend, reason: str) -> str:
    """One sentence with option, reason and remedy."""
    others = [b.name for b in BACKENDS if b.name != backend.name and not b.unavailable()]
    install = f" To get it: {backend.install}." if "installed" in reason and backend.install else ""
    return (
        f"attention={backend.name!r} ({backend.title}) cannot be used: {reason}.{install} "
        f"Or set attention='auto', which takes what fits; on this machine there is also {', '.join(map(repr, others))}."
    )
