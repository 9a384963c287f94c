"""Sharded modules resume exactly, on any number of ranks, from a file or a directory, with or without this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def launch(phase: str, folder: Path, processes: int, worker: str = "checkpoint_worker.py") -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    done = subprocess.run(
        [*command, str(HERE / worker), phase, str(folder)], env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


# Three launches of some 15 seconds each: a number of ranks cannot change inside of one.
def test_resuming_on_two_one_and_two(tmp_path: Path) -> None:
    assert launch("two", tmp_path, 2).count("ok ") == 14
    assert launch("one", tmp_path, 1).count("ok ") == 4
    assert launch("two_again", tmp_path, 2).count("ok ") == 6
