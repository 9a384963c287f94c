"""Who reads padded positions that nobody can compute: those of a model in pieces, whose ranks must run it equally often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reads:
    """What training steps read at padded positions of sharded models.

    Attributes:
        in_step: a training step is being made, and reads of its model calls are checked.
        noted: reads of the step in hand, as ``(packed module, what read, whether with gradients)``; the readers are
            given zeros, and the step counts for nothing. None where a read is an error.
    """

    in_step: bool = False
    noted: list[tuple[Any, str, bool]] | None = field(default=None)

    def note(self, packed: Any, what: str, with_gradients: bool) -> bool:
        """Write a read down; False if it is an error."""
        if self.noted is None:
            return False
        self.noted.append((packed, what, with_gradients))
        return True
