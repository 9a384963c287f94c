"""Attributes of other people's objects, replaced for a while."""

from __future__ import annotations

from typing import Any


class WrappedAttributes:
    """Replaces instance attributes and puts them back in reverse order."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, replacement: Any) -> None:
        self._before.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, replacement)

    def restore(self) -> None:
        for owner, name, before in reversed(self._before):
            if before is None:
                owner.__dict__.pop(name, None)
            else:
                setattr(owner, name, before)
        self._before.clear()
