"""What a rotary function does with its arguments, found by calling it on small random tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_liger.kernels.rotation import PAIRS
from lightning_liger.kernels.surroundings import undisturbed

# Where states keep their heads (b, h, s, d), and the shape of the angles that go with them (s, w: R or R / 2 of them).
_SHAPES = (("bhsd", "bsw"), ("bshd", "bsw"), ("shd", "sw"), ("bshd", "s1w"), ("bhsd", "sw"), ("bshd", "sw"))
_ANGLES = {("cos", "sin"): "cos sin", ("sin", "cos"): "sin cos", ("freqs_cis",): "complex", ("freqs_ci",): "complex"}


@dataclass(frozen=True)
class Call:
    """The signature: how many tensors are rotated, and what the angles are (``"cos sin"``, ``"sin cos"``, ``"complex"``)."""

    states: int
    angles: str

    @property
    def arguments(self) -> int:
        return self.states + (1 if self.angles == "complex" else 2)


@dataclass(frozen=True)
class Form:
    """What one rotary function computes.

    Attributes:
        call: see :class:`Call`.
        pairs: see :func:`lightning_liger.kernels.rotation.rope`.
        reads: which entries of ``cos`` are the angles of the pairs: ``"each"`` (there are R / 2), ``"first"`` half; or
            all R, which have to be equal in ``"halves"`` or as ``"neighbours"``.
        shapes: pairs of (states, angles) that it takes.
        part: where the rotated entries of a head are when ``cos`` has fewer: ``"first"``, ``"last"``, or ``""``: never.
        unsqueezes: ``unsqueeze_dim=2`` makes it take ``bshd``.
    """

    call: Call
    pairs: str
    reads: str
    shapes: tuple[tuple[str, str], ...]
    part: str = ""
    unsqueezes: bool = False

    def angles(self, cos: Tensor) -> Tensor:
        """One angle per pair, first."""
        return cos[..., 0::2] if self.reads == "neighbours" else cos

    def rotary_dim(self, head_dim: int, width: int) -> int | None:
        """How many entries of a head are rotated when ``cos`` has ``width``, or None for what was not compared."""
        rotated = 2 * width if self.reads == "each" else width
        if rotated == head_dim or (self.part and rotated < head_dim):
            return rotated
        return None


def call_of(function: Callable[..., Any]) -> Call | None:
    """``f(x, cos, sin, …)``, ``f(q, k, cos, sin, …)`` or ``f(q, k, freqs_cis)``; None for anything else."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    names = [p.name for p in parameters]
    for states in (1, 2):
        for wanted, kind in _ANGLES.items():
            rest = parameters[states + len(wanted) :]
            if tuple(names[states : states + len(wanted)]) == wanted and all(
                p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in rest
            ):
                return Call(states, kind)
    return None


def example(
    call: Call, shapes: tuple[str, str], reads: str, part: str, head_dim: int
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Random states of two sequences, five positions and four (keys: two) heads, with angles to turn them by."""
    sizes = {"b": 2, "s": 5, "d": head_dim, "1": 1}
    rotated = 2 * max(1, head_dim // 4) if part else head_dim
    states = [
        torch.randn([heads if c == "h" else sizes[c] for c in shapes[0]])
        for heads in ((4,) if call.states == 1 else (4, 2))
    ]
    lead = [sizes[c] for c in shapes[1][:-1]]
    angles = torch.randn(*lead, rotated // 2)
    if reads == "halves":
        angles = torch.cat((angles, angles), -1)
    elif reads == "neighbours":
        angles = angles.repeat_interleave(2, -1)
    elif reads == "first":
        angles = torch.cat((angles, torch.randn_like(angles)), -1)
    cos, sin = angles.cos(), angles.sin()
    if call.angles == "complex":
        return states, (torch.complex(cos, sin),)
    return states, (sin, cos) if call.angles == "sin cos" else (cos, sin)


def cos_sin(call: Call, angles: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The angles in one order, whatever the function takes."""
    if call.angles == "complex":
        return angles[0].real, angles[0].imag
    return (angles[1], angles[0]) if call.angles == "sin cos" else (angles[0], angles[1])


def to_bhsd(x: Tensor, layout: str) -> Tensor:
    return {"bhsd": lambda: x, "bshd": lambda: x.transpose(1, 2), "shd": lambda: x.transpose(0, 1)[None]}[layout]()


def from_bhsd(x: Tensor, layout: str) -> Tensor:
    return {"bhsd": lambda: x, "bshd": lambda: x.transpose(1, 2), "shd": lambda: x[0].transpose(0, 1)}[layout]()


def to_bsw(angles: Tensor, layout: str) -> Tensor:
    return {"bsw": lambda: angles, "sw": lambda: angles[None], "s1w": lambda: angles.transpose(0, 1)}[layout]()


def _formula(x: Tensor, cos: Tensor, sin: Tensor, pairs: str, part: str) -> Tensor:
    """``(B, heads, S, D)`` turned by ``(B, S, R / 2)``."""
    r = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    before, x, after = (
        (x[..., :-r], x[..., -r:], x[..., :0]) if part == "last" else (x[..., :0], x[..., :r], x[..., r:])
    )
    a, b = (x[..., : r // 2], x[..., r // 2 :]) if pairs == "halves" else (x[..., 0::2], x[..., 1::2])
    turned = (a * cos - b * sin, b * cos + a * sin)
    both = torch.stack(turned, -1).flatten(-2) if pairs == "neighbours" else torch.cat(turned, -1)
    return torch.cat((before, both, after), -1)


def _agrees(function: Callable[..., Any], form: Form, shapes: tuple[str, str], head_dim: int, **options: Any) -> bool:
    states, angles = example(form.call, shapes, form.reads, form.part, head_dim)
    try:
        out = function(*states, *angles, **options)
    except Exception:  # these shapes mean nothing to it
        return False
    out = (out,) if isinstance(out, Tensor) else out
    cos, sin = (form.angles(to_bsw(t, shapes[1])) for t in cos_sin(form.call, angles))
    half = (2 * max(1, head_dim // 4) if form.part else head_dim) // 2
    expected = [
        from_bhsd(_formula(to_bhsd(x, shapes[0]), cos[..., :half], sin[..., :half], form.pairs, form.part), shapes[0])
        for x in states
    ]
    return len(out) == len(expected) and all(
        isinstance(a, Tensor) and a.shape == b.shape and torch.allclose(a.float(), b, atol=1e-5)
        for a, b in zip(out, expected, strict=True)
    )


def _guesses(call: Call) -> Iterator[tuple[str, str, tuple[str, str]]]:
    for shapes in _SHAPES:
        for pairs in PAIRS:
            for reads in ("each",) if call.angles == "complex" else ("each", "first", "halves", "neighbours"):
                yield pairs, reads, shapes


@functools.lru_cache(256)
def form_of(function: Callable[..., Any], head_dim: int) -> Form | None:
    """What the function computes, or None when it is no rotation by any formula here."""
    call = call_of(function)
    if call is None or head_dim < 4 or head_dim % 2:
        return None
    with undisturbed(), torch.no_grad():
        for pairs, reads, first in _guesses(call):
            found = Form(call, pairs, reads, (first,))
            if _agrees(function, found, first, head_dim):
                break
        else:
            return None
        shapes = tuple(s for s in _SHAPES if _agrees(function, found, s, head_dim))
        part = ""
        if found.pairs != "gathered" and head_dim >= 8:
            for place in ("first", "last"):
                if _agrees(function, Form(call, pairs, reads, shapes, place), first, head_dim):
                    part = place
        unsqueezes = _takes(function, "unsqueeze_dim") and _agrees(
            function, found, ("bshd", "bsw"), head_dim, unsqueeze_dim=2
        )
    return Form(call, pairs, reads, shapes, part, unsqueezes)


def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters
