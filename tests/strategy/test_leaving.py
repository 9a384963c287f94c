"""The process ends once its threads have let go of what they hold."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from lightning_liger.parallel.leaving import wait_for_threads


def test_idle_threads_are_not_waited_for() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    began = time.monotonic()
    wait_for_threads()
    took = time.monotonic() - began
    done.set()
    thread.join()
    assert took < 1.0


# A C thread that ends up asking for the interpreter's lock, as gloo's do to let go of a tensor.
_LATE = """
import sys, threading, time
import torch.distributed as dist
from lightning_liger.parallel.leaving import leave_quietly
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
leave_quietly()

def late():
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    sys.stderr.write("done")

threading.Thread(target=late, daemon=True).start()
"""


def test_every_strategy_with_several_processes_waits() -> None:
    code = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning_liger import LigerCallback
from lightning_liger.parallel import leaving

leaving.wait_for_threads = lambda: print("waited", flush=True)
strategy = DDPStrategy(process_group_backend="gloo")
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
L.Trainer(accelerator="cpu", strategy=strategy, devices=1, max_steps=1, limit_val_batches=0,
          callbacks=[LigerCallback(verbose=False)], **options).fit(BoringModel())
"""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0 and "waited" in ended.stdout, ended.stderr[-2000:]


def test_busy_threads_are() -> None:
    ended = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "done" in ended.stderr
