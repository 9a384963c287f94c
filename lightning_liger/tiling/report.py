"""Which MLPs are computed in chunks, and why others are not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TilingReport:
    """Plain Python numbers, so that counting never waits for a device.

    Attributes:
        asked: the option says more than ``"auto"``.
        found: MLPs that were looked at. applied: those that can be computed in chunks. kinds: their classes.
        calls: in chunks. chunks: in the longest of these calls. tokens: in that call.
        off: reasons.
    """

    asked: bool = False
    found: int = 0
    applied: int = 0
    kinds: list[str] = field(default_factory=list)
    calls: int = 0
    chunks: int = 0
    tokens: int = 0
    off: list[str] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> TilingReport:
        return self

    def refuse(self, reason: str) -> None:
        if reason not in self.off:
            self.off.append(reason)

    def name(self, kind: str) -> None:
        """Add ``kind`` to the classes."""
        if kind not in self.kinds:
            self.kinds.append(kind)

    def ran(self, tokens: int, chunks: int) -> None:
        self.calls += 1
        if tokens > self.tokens:
            self.tokens, self.chunks = tokens, chunks

    def restart(self) -> None:
        """Count from zero; what is on, and the reasons for what is off, stay."""
        self.calls = self.chunks = self.tokens = 0

    def rows(self) -> list[tuple[str, str, str]]:
        """``(feature, where, what it did)`` for the table."""
        if not self.calls and not self.asked:
            return []
        where = f"{self.applied} of {self.found} MLPs ({', '.join(self.kinds)})" if self.found else "none found"
        did = f"{self.tokens:,} tokens in {self.chunks} chunks" if self.calls else "no call was long enough"
        return [("MLPs in chunks", where, did)]

    def reasons(self) -> list[str]:
        """Nothing is said of what nobody asked for."""
        return [f"MLPs in chunks: {reason}" for reason in self.off] if self.asked else []

    def to_dict(self) -> dict[str, Any]:
        return {
            "applied": self.applied,
            "found": self.found,
            "calls": self.calls,
            "tokens": self.tokens,
            "chunks": self.chunks,
            "off": list(self.off),
        }
