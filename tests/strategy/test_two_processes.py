"""Two processes: what the strategy shards trains as it does on one process with the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CASES = 21


# Two processes that import Lightning and transformers take some 15 seconds of it; all comparisons share one launch.
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_one_process_and_two_agree(accelerator: str) -> None:
    if accelerator == "gpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [str(HERE), str(HERE.parent), *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    environment["TEST_ACCELERATOR"] = accelerator
    done = subprocess.run(
        [*command, str(HERE / "worker.py")], env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert done.stdout.count("ok ") == CASES, done.stdout
