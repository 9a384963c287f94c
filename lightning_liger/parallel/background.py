"""Saving while training goes on: one save at a time, in a thread, whose errors reach every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist


class BackgroundSave:
    """Runs one save at a time behind the training loop. Every method is called by every rank."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._afterwards: list[Callable[[], None]] = []
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Ranks talk over it inside a save, so that they cannot meet the training step's own communication."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        return self._group

    def start(self, save: Callable[[], None]) -> None:
        """Run ``save`` in the background, once the one before is done.

        Raises:
            RuntimeError: the save before failed, on this rank or another.
        """
        self.wait()
        _ = self.group  # made by all ranks here: the thread could not

        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if device is not None:  # a new thread begins on the first one, whatever rank this is
                    torch.cuda.set_device(device)
                save()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="liger-checkpoint", daemon=False)
        self._thread.start()

    def afterwards(self, act: Callable[[], None]) -> None:
        """Run ``act`` once the save that is under way has succeeded: at once if there is none."""
        if self._thread is None:
            act()
        else:
            self._afterwards.append(act)

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            RuntimeError: it failed, on this rank or another. What should have followed it does not.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        error, self._error = self._error, None
        acts, self._afterwards = self._afterwards, []
        if error is not None:  # the save itself makes an error on one rank an error on all
            raise RuntimeError(f"A checkpoint that was saved in the background is lost: {error}") from error
        for act in acts:
            act()
