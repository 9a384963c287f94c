"""Starts the tests in ``interpreted/``, a few at a time, with Triton's interpreter switched on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Few processes: importing everything takes longer than most of these files.
GROUPS = {
    "architectures": ("test_architectures.py",),
    "modules": (
        "test_functions.py",
        "test_structures.py",
        "test_rotary.py",
        "test_rotary_kinds.py",
        "test_litgpt.py",
        "test_plain_decoders.py",
        "test_options.py",
        "test_adam_kernel.py",
    ),
    "company": (
        "test_copies.py",
        "test_isolation.py",
        "test_proof.py",
        "test_refusals.py",
        "test_sharding.py",
        "test_trainers.py",
    ),
}

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="Liger is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreted"),
]


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted(group: str) -> None:
    files = [str(HERE / "interpreted" / name) for name in GROUPS[group]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfEs", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1])
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0


def test_every_interpreted_file_is_started() -> None:
    assert {file for files in GROUPS.values() for file in files} == {
        p.name for p in (HERE / "interpreted").glob("test_*.py")
    }


def test_this_process_is_not_interpreted() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1"
