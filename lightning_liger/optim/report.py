"""How optimizers step, and what stood against another way."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class OptimizerReport:
    """Of the optimizers of one training.

    Attributes:
        found: optimizers. applied: those that step all at once. by: ``"Triton"`` or ``"PyTorch's operators"``.
        state_dtype: of both moments. bytes: of this rank's moments, once all have been made.
        off: reasons against what was asked for, or would have been taken.
    """

    found: int = 0
    applied: int = 0
    by: str = ""
    state_dtype: str = ""
    bytes: int = 0
    clipping: str = ""
    off: list[str] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerReport:
        return self

    def refuse(self, reason: str) -> None:
        if reason not in self.off:
            self.off.append(reason)

    def rows(self) -> list[tuple[str, str, str]]:
        """``(feature, where, what it did)`` for the table."""
        if not self.applied:
            return []
        did = f"one step for all parameters by {self.by}{self.clipping}; moments in {self.state_dtype}"
        rounds = ", rounded stochastically" if self.state_dtype == "bf16" else ""
        where = f"{self.applied} of {self.found} optimizer{'' if self.found == 1 else 's'}"
        return [("Optimizer", where, f"{did}{rounds}: {self.bytes / 2**30:.2f} GiB")]

    def reasons(self) -> list[str]:
        return [f"Optimizer: {reason}" for reason in self.off]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
