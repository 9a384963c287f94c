"""Tensors that have not computed their values yet, and what must happen before the weights change under them.

User code may keep logits past an optimizer's step, for a metric at the end of the epoch. What they were must then be
computed before the step, as it was in the plain run.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary


class Pending(Protocol):
    """A tensor that computes itself when it is read."""

    def settle_for_good(self) -> None:
        """Compute the values now and keep them; nothing happens if that is done."""


_PENDING = WeakIdKeyDictionary(ref_type=weakref.ref)


class Newcomer(Protocol):
    """A head that has not run yet, and may have been sharded since it was found."""

    def look_for_shards(self) -> None: ...


# asked before the first lazy hidden states go into a head: FSDP's hooks would take them for ordinary tensors
NEWCOMERS: weakref.WeakSet[Newcomer] = weakref.WeakSet()


def note_pending(tensor: Pending) -> None:
    """Remember ``tensor`` for as long as somebody holds it."""
    _PENDING[tensor] = None


def settle_pending() -> int:
    """Compute what is still held somewhere, without a graph, and say how many tensors that were.

    Call it before an optimizer's step. Usually nothing is held any more by then.
    """
    from lightning_liger.padding.backends.errors import PackingError

    held = list(_PENDING)
    _PENDING.clear()
    with torch.no_grad():
        for tensor in held:
            # Holding on to logits is no reading of them: where they cannot be computed, whoever reads them is told so.
            with contextlib.suppress(PackingError):
                tensor.settle_for_good()
    return len(held)
