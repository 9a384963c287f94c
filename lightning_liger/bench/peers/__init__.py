"""Other ways to train the same model on the same data: one module each, with ``variants`` and ``run``."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from lightning_liger.bench.messages import Ready
from lightning_liger.bench.peers.session import Session
from lightning_liger.bench.variants import Variant

PEERS = ("trainer", "trl", "litgpt", "torchtitan", "unsloth")
_MODULES = {"trl": "sft", "litgpt": "fabric", "torchtitan": "titan", "unsloth": "sloth"}


def variants(names: Iterable[str], plain: Ready | None, budget: int | str) -> list[Variant]:
    """Rows of the table; a peer that cannot run here is one that says so.

    Args:
        names: of :data:`PEERS`.
        plain: what the plain run says of itself.
        budget: tokens of packed batches.
    """
    return [variant for name in names for variant in _module(name).variants(plain, budget)]


def run(variant: Variant, session: Session) -> None:
    """Train until no further step is asked for."""
    _module(variant.peer).run(session, **variant.arguments)


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")
