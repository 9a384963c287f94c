"""Starts the tests in ``interpreted/``, a few at a time, with Triton's interpreter switched on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GROUPS = {
    "llama, qwen2, qwen3": ("test_architectures.py", "llama or qwen2 or qwen3"),
    "mistral, gemma, gemma2": ("test_architectures.py", "mistral or gemma"),
    "phi3, granite, olmo2": ("test_architectures.py", "phi3 or granite or olmo2"),
    "mixtral": ("test_architectures.py", "mixtral"),
    "functions": ("test_functions.py", ""),
    "structures": ("test_structures.py", ""),
    "rotary": ("test_rotary.py", ""),
    "litgpt": ("test_litgpt.py", ""),
    "decoders": ("test_plain_decoders.py", ""),
    "refusals": ("test_refusals.py", ""),
    "isolation": ("test_isolation.py", ""),
    "copies": ("test_copies.py", ""),
    "options": ("test_options.py", ""),
    "sharding": ("test_sharding.py", ""),
}

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="Liger is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreted"),
]


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted(group: str) -> None:
    file, names = GROUPS[group]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-rfEs",
        str(HERE / "interpreted" / file),
    ]
    if names:
        command += ["-k", names]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1])
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0


def test_every_interpreted_file_is_started() -> None:
    assert {file for file, _ in GROUPS.values()} == {p.name for p in (HERE / "interpreted").glob("test_*.py")}


def test_this_process_is_not_interpreted() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1"
