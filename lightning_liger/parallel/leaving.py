"""The end of a process in which gloo's threads are still at work.

A collective is over for its caller before the thread that ran it has let go of the tensors. Letting go takes the
interpreter's lock, and a thread that asks for it while the interpreter goes down is ended in the middle of C++, which aborts
the process: "terminate called without an active exception", with an exit code that makes torchrun report a failure. Seen
with torch alone as well (2.11 to 2.13), where a machine has more to do than cores.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
from pathlib import Path

import torch.distributed as dist

_POLL = 0.01  # seconds
_QUIET = 3  # polls in a row
_PATIENCE = 2.0  # seconds
_TASKS = Path("/proc/self/task")


def leave_quietly() -> None:
    """Let threads that are about to let go of tensors do so before a process of several goes down."""
    if dist.is_available() and dist.is_initialized():
        _wait_at_exit()


@functools.cache
def _wait_at_exit() -> None:
    atexit.register(wait_for_threads)


def wait_for_threads() -> None:
    """Return once no other thread of this process has had anything to do for a while, or after two seconds."""
    deadline, quiet = time.monotonic() + _PATIENCE, 0
    while quiet < _QUIET and time.monotonic() < deadline:
        time.sleep(_POLL)  # gives the interpreter to whoever waits for it
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    own = threading.get_native_id()
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            # "id (name) state ..."; a name may hold anything
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue  # it is gone
        if int(task.name) != own and state == "R":
            return True
    return False
