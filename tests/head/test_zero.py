"""DeepSpeed's engine at ZeRO stages 2 and 3, two processes: plain and accelerated agree, and the head is fused."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


# One launch of two processes checks every stage with every loss.
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(HERE.parent), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, str(HERE / "zero_worker.py")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert len([line for line in done.stdout.splitlines() if line.startswith("stage ")]) == 18, done.stdout
