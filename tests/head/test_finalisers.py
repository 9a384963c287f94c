"""Objects that a tracer of compiled code made without their ``__init__`` go as quietly as others."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lightning_liger.head.gathering import Hold
from lightning_liger.head.observing import Observation
from lightning_liger.head.readings import Readings
from lightning_liger.parallel.offloading import _Group


@pytest.mark.parametrize("kind", [Hold, Observation, Readings, _Group])
def test_what_was_never_initialised_can_be_forgotten(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    assert "__del__" in vars(kind)
    object.__new__(kind)
    assert errors == []
