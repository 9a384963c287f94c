"""Two processes: a head in a group of its own, in the root's, tied, adapted, frozen; plain and accelerated agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


# One launch of two processes, half of whose time is imports, checks every layout with every loss.
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_two_processes(accelerator: str) -> None:
    if accelerator == "gpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(HERE.parent), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TEST_ACCELERATOR": accelerator}
    done = subprocess.run(
        [*command, str(HERE / "sharded_worker.py")], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert len([line for line in done.stdout.splitlines() if ": " in line]) == 35, done.stdout
