"""What was proved, for the table and for machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class ProofError(RuntimeError):
    """``verify="strict"``: something that was asked for did not run, or computes something else."""


@dataclass
class KernelProofReport:
    """What really ran in one training step.

    Attributes:
        step: the batch that was watched, counted from 1; 0 while nothing was proved.
        how: ``"profiled"``: GPU kernels were recorded; ``"counted"``: calls were.
        ran: modules by feature, as ``(ran, asked for)``.
        backends: what computed attention.
        missing: modules whose replacement did not run, with the reason.
        idle: modules that had nothing to do in that step, with the reason.
        shares: of the device's time, by kind of kernel.
        device_ms: what the kernels of the step took together.
        skipped: why there is no proof, or ``""``.
    """

    step: int = 0
    how: str = ""
    ran: dict[str, tuple[int, int]] = field(default_factory=dict)
    backends: tuple[str, ...] = ()
    missing: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    device_ms: float = 0.0
    skipped: str = ""

    def line(self) -> str:
        """``RMSNorm 57/57 · SwiGLU 28/28 · head+loss 1/1 · attention 28/28 varlen``."""
        parts = [
            f"{name} {ran}/{asked}" + (f" {', '.join(self.backends)}" if name == "attention" and self.backends else "")
            for name, (ran, asked) in self.ran.items()
        ]
        if self.shares:
            parts.append("device time: " + ", ".join(f"{share:.0%} {kind}" for kind, share in self.shares.items()))
        return " · ".join(parts) or "nothing was asked for"

    def row(self) -> tuple[str, str, str]:
        return "Kernel proof", f"step {self.step}, {self.how}", self.line()

    def reasons(self) -> list[str]:
        lines = [f"Kernel proof: did not run: {m}" for m in _shortened(self.missing)]
        lines += [f"Kernel proof: nothing to do: {m}" for m in _shortened(self.idle)]
        return lines + ([f"Kernel proof: {self.skipped}"] if self.skipped else [])

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "how": self.how,
            "ran": {name: list(counts) for name, counts in self.ran.items()},
            "attention": list(self.backends),
            "missing": list(self.missing),
            "idle": list(self.idle),
            "device_time_shares": dict(self.shares),
            "device_ms": self.device_ms,
            "skipped": self.skipped,
        }


@dataclass
class ProofReport:
    """Both proofs of one training."""

    kernels: KernelProofReport = field(default_factory=KernelProofReport)

    def rows(self) -> list[tuple[str, str, str]]:
        return [self.kernels.row()] if self.kernels.step and self.kernels.ran else []

    def reasons(self) -> list[str]:
        return self.kernels.reasons()

    def to_dict(self) -> dict[str, Any]:
        return {"kernels": self.kernels.to_dict()}


_MOST = 4


def _shortened(lines: list[str]) -> list[str]:
    """The first few; the rest is a number."""
    return lines if len(lines) <= _MOST else [*lines[: _MOST - 1], f"and {len(lines) - _MOST + 1} more"]
