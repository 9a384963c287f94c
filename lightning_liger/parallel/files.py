"""Checkpoints appear whole or not at all: written under a temporary name beside their place, then renamed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

_PARTIAL = ".partial"
_PREVIOUS = ".previous"
_ABANDONED_AFTER = 3600.0  # seconds without a write


def partial_path(path: Path) -> Path:
    """Where the checkpoint at ``path`` is written before it is whole: the same directory, so that a rename suffices."""
    return path.with_name(f".{path.name}{_PARTIAL}")


def _previous_path(path: Path) -> Path:
    return path.with_name(f".{path.name}{_PREVIOUS}")


def start(path: Path) -> Path:
    """Make room for a new checkpoint at ``path`` and return where to write it. Half-written ones are removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    discard(partial)
    for left in path.parent.glob(f".*{_PARTIAL}"):
        # other jobs may be saving into the same directory just now
        if time.time() - _last_write(left) > _ABANDONED_AFTER:
            discard(left)
    return partial


def publish(path: Path) -> None:
    """Put the finished checkpoint at its place.

    A file is replaced in one step. A directory cannot be: what was there is moved aside first, and
    :func:`existing` finds it again should the process end between the two renames.
    """
    partial, previous = partial_path(path), _previous_path(path)
    if path.is_symlink() and partial.is_dir():
        path.unlink()
    if (path.is_dir() and not path.is_symlink()) or (path.exists() and partial.is_dir()):
        discard(previous)
        os.rename(path, previous)
    os.replace(partial, path)
    discard(previous)


def existing(path: Path) -> Path:
    """``path``, or the checkpoint that was about to be replaced there when the process ended."""
    previous = _previous_path(path)
    return previous if not path.exists() and previous.exists() else path


def discard(path: Path) -> None:
    """Remove a file, a directory or a link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _last_write(path: Path) -> float:
    inside = list(path.rglob("*")) if path.is_dir() else []
    times = []
    for entry in [path, *inside]:
        try:
            times.append(entry.stat().st_mtime)
        except FileNotFoundError:  # finished or removed meanwhile
            return time.time()
    return max(times)
