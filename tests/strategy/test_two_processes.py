"""Several processes: equal to one process, and all that goes with it. Start-up is most of the time, so cases share it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def environment(accelerator: str = "cpu") -> dict[str, str]:
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TEST_ACCELERATOR": accelerator}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_two_ranks_train_as_one(accelerator: str) -> None:
    # some 65 comparisons of whole trainings, one launch
    if accelerator == "gpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(HERE / "worker.py")]
    done = subprocess.run(command, env=environment(accelerator), capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    checked = [line for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert len(checked) == int(done.stdout.split("cases: ")[1].split()[0]) > 30, done.stdout


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_failing_rank_stops_the_others(accelerator: str) -> None:
    if accelerator == "gpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(HERE / "failing.py"), "30"]
    done = subprocess.run(command, env=environment(accelerator), capture_output=True, text=True, timeout=100)
    assert "rank 1 raised ValueError: the data of rank 1 is broken" in done.stdout
    # Rank 1 sleeps for half a minute. Rank 0 leaves before: NCCL's collective raises, gloo's cannot and the process exits.
    assert "rank 1 stopped with ValueError: the data of rank 1 is broken" in done.stdout + done.stderr, done.stderr[
        -3000:
    ]
    if accelerator == "gpu":
        assert done.stdout.index("rank 0 is done") < done.stdout.index("rank 1 is done")
    else:
        assert "rank 1 is done" not in done.stdout


def test_eight_ranks_on_two_nodes() -> None:
    # eight processes that import torch and Lightning take most of a minute on two cores
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arrangement = ["--nnodes=2", "--nproc-per-node=4", "--master-addr=127.0.0.1", f"--master-port={port}"]
    nodes = [
        subprocess.Popen(
            [*TORCHRUN, *arrangement, f"--node-rank={rank}", str(HERE / "nodes.py")],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [node.communicate(timeout=150) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], results[0][1][-3000:] + results[1][1][-3000:]
    assert results[0][0].count("ok ") == 3, results[0][0]
