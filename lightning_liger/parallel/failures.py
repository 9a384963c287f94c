"""One rank fails: the others learn why and stop, instead of waiting for it in a collective until that times out."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

import torch.distributed as dist

_POLL = 1.0  # seconds
_PATIENCE = 10.0  # seconds for a rank that fails by itself at about the same time, or whose connections broke
_GRACE = 30.0  # seconds for an aborted collective to raise


class FailureWatch:
    """A thread that looks for a failure another rank has published in the job's key-value store.

    NCCL's collectives are aborted then, so that the training thread raises. Gloo's cannot be: a process that still waits
    after a grace period says why and exits, as its launcher would make it do later.
    """

    _runs = 0

    def __init__(self) -> None:
        FailureWatch._runs += 1  # ranks make theirs in step
        self._key = f"lightning_liger/failure/{FailureWatch._runs}"
        self._stopped = threading.Event()
        self._found = ""
        # a connection of its own: the training thread may be blocked in the other one
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._rank = dist.get_rank()
        self._thread = threading.Thread(target=self._watch, name="liger-failures", daemon=True)
        self._thread.start()
        # a thread that is still in the store's code while the interpreter goes down would abort the process
        atexit.register(self.stop)

    def publish(self, exception: BaseException) -> None:
        """Called on a rank that fails by itself."""
        text = f"rank {self._rank} stopped with {type(exception).__name__}: {exception}"
        try:
            self._store.compare_set(self._key, "", text)
        except RuntimeError:
            return  # the store went away with rank 0

    def explain(self, exception: BaseException) -> None:
        """Say in ``exception`` which rank's failure it follows from, if it does; publish it if it is the first.

        A rank whose collective broke may be told so before it has been told why.
        """
        broken = isinstance(exception, RuntimeError) and any(word in str(exception) for word in _BROKEN)
        if not broken and not self._found:
            self.publish(exception)
        elif not self._found:
            self._look(wait=3 * _POLL)
        if broken and self._found and not self._found.startswith(f"rank {self._rank} "):
            exception.args = (f"{self._found}\nRank {self._rank} stopped because of it, in: {exception}",)

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5 * _POLL)
        atexit.unregister(self.stop)

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL):
            if self._look() and not self._found.startswith(f"rank {self._rank} "):
                self._leave()
                return

    def _look(self, wait: float = 0.0) -> bool:
        try:
            while not self._store.check([self._key]):
                if wait <= 0 or self._stopped.wait(_POLL / 4):
                    return False
                wait -= _POLL / 4
            self._found = self._store.get(self._key).decode()
        except RuntimeError:
            return False
        return True

    def _leave(self) -> None:
        if self._stopped.wait(_PATIENCE):
            return
        if dist.is_initialized() and "nccl" in dist.get_backend_config():
            dist.distributed_c10d._abort_process_group()
        if not self._stopped.wait(_GRACE):
            sys.stderr.write(f"{self._found}\nRank {self._rank} was waiting for it, and exits.\n")
            sys.stderr.flush()
            os._exit(1)


_BROKEN = ("Connection closed by peer", "Connection reset", "NCCL", "ncclInternalError", "aborted", "gloo")
