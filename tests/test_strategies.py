"""Two processes over gloo: training is the same under DDP and under the user's own FSDP2, and rates are true sums."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


# Two processes that import Lightning and transformers take some 15 seconds of it; the comparisons share one launch.
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("which", ["ddp", "model_parallel"])
def test_two_processes(which: str, accelerator: str) -> None:
    if accelerator == "gpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    environment["TEST_ACCELERATOR"] = accelerator
    done = subprocess.run(
        [*command, str(HERE / "ddp_worker.py"), which], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line for line in done.stdout.splitlines() if " loss " in line]
    assert len(lines) == {"ddp": 6, "model_parallel": 4}[which], done.stdout
