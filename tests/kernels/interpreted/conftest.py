"""Puts the interpreter right before any kernel runs."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

TESTS = str(Path(__file__).parents[2])
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

# It changes a process for good: only one that was started for it, and none in which other tests run as well.
if os.environ.get("TRITON_INTERPRET") == "1":
    import liger_interpreter  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]

warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)

# The comparison takes half of the time of tests that are about something else; there, each question is asked once.
ABOUT_SOMETHING_ELSE = (
    "test_copies",
    "test_isolation",
    "test_proof",
    "test_refusals",
    "test_sharding",
    "test_trainers",
)
_VERDICTS: dict[object, Any] = {}


@pytest.fixture(autouse=True)
def ask_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.module.__name__ not in ABOUT_SOMETHING_ELSE or "comparison" in request.node.name:
        return
    from lightning_liger.kernels import apply

    real = apply.verify

    def verify(patch: Any, module: Any, device: Any) -> Any:
        key = (patch, _without_identities(patch.key(module)))
        if key not in _VERDICTS:
            _VERDICTS[key] = real(patch, module, device)
        return _VERDICTS[key]

    monkeypatch.setattr(apply, "verify", verify)


def _without_identities(key: object) -> object:
    """A model's configuration is another object in every test, and says nothing about its modules."""
    if isinstance(key, tuple):
        if len(key) == 2 and key[0] in ("config", "_buffers", "_hf_hook"):
            return key[0]
        return tuple(_without_identities(part) for part in key)
    return key
