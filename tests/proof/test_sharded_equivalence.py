"""The equivalence proof under FSDP2: on one process, and on two in one launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
WORKER = str(HERE / "sharded_worker.py")


def run(*command: str) -> str:
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def test_two_ranks_decide_as_one() -> None:
    # two dozen trainings; most of the time is the start of two processes
    found = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", WORKER)
    assert found.count("\nok ") + found.startswith("ok ") == int(found.split("cases: ")[1].split()[0]) >= 12, found


def test_one_rank() -> None:
    names = ["tied", "accumulating_and_resharding", "manual", "preference"]
    assert run(WORKER, *names).count("ok ") == len(names)


@pytest.mark.gpu
def test_one_rank_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    os.environ["TEST_ACCELERATOR"] = "gpu"
    try:
        names = ["tied", "in_bf16", "accumulating_and_resharding", "manual", "preference"]
        assert run(WORKER, *names).count("ok ") == len(names)
    finally:
        del os.environ["TEST_ACCELERATOR"]
