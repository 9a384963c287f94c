"""How decoder blocks run, and what that was decided by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class BlocksReport:
    """Of all packed backbones of one accelerated module.

    Attributes:
        found: blocks that could be compiled; applied: that are; pending: that will be from the next batch on.
        decided: the way they run and the numbers that speak for it; ``""`` where there was nothing to decide.
        off: reasons against what was asked for, or would have been tried.
    """

    found: int = 0
    applied: int = 0
    pending: int = 0
    decided: str = ""
    off: list[str] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlocksReport:
        return self

    def refuse(self, reason: str) -> None:
        if reason not in self.off:
            self.off.append(reason)

    def rows(self) -> list[tuple[str, str, str]]:
        """``(feature, where, what it did)`` for the table."""
        if not self.decided:
            return []
        where = f"{self.pending or self.applied} of {self.found} blocks"
        return [("Decoder blocks", where + (", from the next batch on" if self.pending else ""), self.decided)]

    def reasons(self) -> list[str]:
        return [f"Decoder blocks: {reason}" for reason in self.off]

    def to_dict(self) -> dict[str, Any]:
        return {"applied": self.applied, "found": self.found, "decided": self.decided, "off": list(self.off)}
