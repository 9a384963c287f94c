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
from lightning_liger.parallel.leaving import leave_quietly
leave_quietly()

def late():
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    sys.stderr.write("done")

threading.Thread(target=late, daemon=True).start()
"""


def test_busy_threads_are() -> None:
    ended = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "done" in ended.stderr
