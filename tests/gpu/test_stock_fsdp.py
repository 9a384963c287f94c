"""Lightning's own FSDP strategy, which needs CUDA: what can be right under it is applied, the rest is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

HERE = Path(__file__).parent


def test_it_trains_as_without_the_callback() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(HERE.parent), *sys.path])
    done = subprocess.run(
        [*command, str(HERE / "stock_fsdp_worker.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.count("ok ") == 3, done.stdout
