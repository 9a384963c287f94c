"""Rank 0 times, all ranks run what it decided: DDP and liger_fsdp over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [str(HERE), str(HERE.parent), *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    worker = str(HERE / "ranks_worker.py")
    done = subprocess.run([*command, worker], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line.split(":")[0] for line in done.stdout.splitlines() if ": " in line]
    assert lines == ["ddp", "fsdp", "fsdp full", "fsdp selective"]
