"""Puts the interpreter right before any kernel runs."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

TESTS = str(Path(__file__).parents[2])
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

import liger_interpreter  # noqa: E402, F401

warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
