"""The proofs that a training asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_liger.accelerate import Accelerated
from lightning_liger.hooks import TrainingHooks
from lightning_liger.proof.equivalence import EquivalenceProof
from lightning_liger.proof.first_step import FirstStep
from lightning_liger.proof.kernels import KernelProof
from lightning_liger.settings import Settings


def proofs(
    settings: Settings,
    accelerated: Callable[[], Accelerated],
    wrap: Callable[[Any, str, Any], None],
    say: Callable[[str], None],
) -> list[TrainingHooks]:
    """By the options ``verify`` and ``profile``; see :class:`EquivalenceProof` and :class:`KernelProof`; :class:`FirstStep` always."""
    # inside of what is proved
    made: list[TrainingHooks] = [FirstStep(accelerated, wrap)]
    if settings.verify != "off":
        made.append(EquivalenceProof(accelerated, settings.verify, wrap))
    if settings.verify != "off" or settings.profile is not None:
        made.append(KernelProof(accelerated, settings.verify, settings.profile, say))
    return made
