"""What can go wrong between a packed call and its attention."""

from __future__ import annotations


class PackingError(RuntimeError):
    """A packed call reached code that would have ignored the document boundaries."""


class BackendError(PackingError):
    """The attention backend that the user chose cannot run this model."""
