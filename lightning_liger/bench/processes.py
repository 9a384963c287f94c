"""The other side of :mod:`lightning_liger.bench.worker`: processes that are started, asked, and always ended."""

from __future__ import annotations

import multiprocessing
from typing import Any

from lightning_liger.bench.job import Build
from lightning_liger.bench.messages import GO, STOP, Done, Failure, Plan, Ready, Turn
from lightning_liger.bench.variants import Variant
from lightning_liger.bench.worker import serve


class Worker:
    """One process that measures; it runs one variant at a time."""

    def __init__(self, build: Build, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share the parent's threads and its CUDA context
        self._pipe, theirs = context.Pipe()
        # not daemonic: DataLoaders have children of their own
        self._process = context.Process(target=serve, args=(theirs, build, plan), daemon=False)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self.alive = True

    def order(self, variant: Variant) -> None:
        """Begin to set up a run; :meth:`ready` waits for it."""
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
