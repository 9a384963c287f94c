"""Two processes over gloo: meta, checkpointing, offload and generation on sharded models equal one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


# two processes that import transformers and train some 20 tiny models; the comparisons share one launch
def test_sharded_as_one_process() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [*command, str(HERE / "memory_worker.py")], env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = done.stdout.splitlines()
    assert sum(" meta, filled" in line for line in lines) == 4, done.stdout
    assert sum(" checkpointing " in line for line in lines) == 14, done.stdout
    assert sum(line.startswith("ok ") for line in lines) == 10, done.stdout
    assert sum(" generate, " in line for line in lines) == 8, done.stdout
    assert sum("trains afterwards" in line for line in lines) == 2, done.stdout
