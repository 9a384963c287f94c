"""The other side of :mod:`lightning_liger.bench.worker`: processes that are started, asked, and always ended."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from lightning_liger.bench.job import Build
from lightning_liger.bench.messages import GO, STOP, Done, Failure, Hello, Plan, Ready, Turn
from lightning_liger.bench.variants import Variant


def prepare() -> None:
    """Begin what the first :class:`Worker` would wait for, beside the imports of this process."""
    context = _context()
    if context.get_start_method() == "forkserver":
        from multiprocessing import forkserver

        forkserver.ensure_running()


def _context() -> Any:
    """Processes are forked from a server that has imported everything, where the system can.

    Not from this one, whose threads and CUDA context they would share.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_liger.bench.preload"])
    return context


class Worker:
    """One process that measures; it runs one variant at a time. Several can start at the same time."""

    def __init__(self, build: Build, plan: Plan) -> None:
        self._args = (build, plan)
        self._start(_context())

    def _start(self, context: Any) -> None:
        from lightning_liger.bench.worker import serve

        self._pipe, theirs = context.Pipe()
        # not daemonic: DataLoaders have children of their own
        self._process = context.Process(target=serve, args=(theirs, *self._args, dict(os.environ)), daemon=False)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self.alive = True
        self._started = False

    def started(self) -> None:
        """Returns when the process has imported what it needs."""
        if self._started:
            return
        hello = self._receive()
        if isinstance(hello, Hello) and not hello.usable:
            self.close()
            self._start(multiprocessing.get_context("spawn"))
            self._receive()
        self._started = True

    def order(self, variant: Variant) -> None:
        """Begin to set up a run; :meth:`ready` waits for it."""
        self.started()
        self._send(variant)

    def ready(self) -> Ready | Failure:
        return self._receive()

    def turn(self) -> Turn | Failure:
        """Train for one turn."""
        self._send(GO)
        return self._receive()

    def stop(self) -> Done | Failure:
        """End the run."""
        self._send(STOP)
        return self._receive()

    def close(self) -> None:
        """End the process."""
        self._send(None)
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
        self.alive = False

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError:  # the process is gone, which the next receive tells
            self.alive = False

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(timeout=10)
            self.alive = False
            code = self._process.exitcode
            killed = code is not None and code < 0
            why = f"by signal {-code}" if killed and code is not None else f"with exit code {code}"
            return Failure(f"the process ended {why}" + (": out of memory?" if code == -9 else ""), code == -9)
        return answer
