"""Features of acceleration, one by one: off for a run, or for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_liger.accelerate import Accelerated
from lightning_liger.patching import Rebound

_PADDING, _HEAD, _ATTENTION = "padding", "head+loss", "attention"
_TITLES = {_PADDING: "padding removal", _HEAD: "the fused head", _ATTENTION: "attention over packed documents"}


def features(handle: Accelerated) -> list[str]:
    """What is bound, the smallest first: kernels by kind, then the head, then attention and the padding itself."""
    bound = list(dict.fromkeys(b.feature for b in handle.bindings() if b.feature and b.binding() is not None))
    kernels = [f for f in bound if f not in _TITLES]
    others = [f for f in (_HEAD, _ATTENTION, _PADDING) if f in bound]
    if _ATTENTION in others and not _backends(handle):
        others.remove(_ATTENTION)
    return [title(f) for f in (*kernels, *others)]


def title(feature: str) -> str:
    return _TITLES.get(feature, feature)


def _bindings(handle: Accelerated, titles: list[str]) -> list[Rebound]:
    found = [b.binding() for b in handle.bindings() if title(b.feature) in titles and b.feature != _ATTENTION]
    return [b for b in found if b is not None]


def _backends(handle: Accelerated) -> list[Rebound]:
    """Backbones whose documents could be attended to by the model's own function instead."""
    found = [b.binding() for b in handle.bindings() if b.feature == _PADDING]
    return [b for b in found if b is not None and getattr(b, "backend", "sdpa") != "sdpa"]


@contextmanager
def muted(handle: Accelerated, titles: list[str]) -> Iterator[None]:
    """Without some of the features."""
    bindings = _bindings(handle, titles)
    attending = _backends(handle) if _TITLES[_ATTENTION] in titles else []
    before = [getattr(b, "backend") for b in attending]  # noqa: B009
    for binding in bindings:
        binding.muted = True
    for binding in attending:
        setattr(binding, "backend", "sdpa")  # noqa: B010
    try:
        yield
    finally:
        for binding in bindings:
            binding.muted = False
        for binding, name in zip(attending, before, strict=True):
            setattr(binding, "backend", name)  # noqa: B010


def switch_off(handle: Accelerated, titles: list[str], reason: str) -> None:
    """For the rest of this ``accelerate`` call's life."""
    for binding in _bindings(handle, titles):
        binding.muted = True
    if _TITLES[_ATTENTION] in titles:
        for binding in _backends(handle):
            setattr(binding, "backend", "sdpa")  # noqa: B010
    report = handle.report
    if _TITLES[_HEAD] in titles:
        report.head.refuse(reason)
    if _TITLES[_PADDING] in titles or _TITLES[_ATTENTION] in titles:
        report.padding.refuse(reason)
    for op in report.kernels.ops.values():
        if op.title in titles:
            op.refuse(reason)
