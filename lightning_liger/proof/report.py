"""What was proved, for the table and for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_liger.proof.comparing import Agreement


class ProofError(RuntimeError):
    """``verify="strict"``: something that was asked for did not run, or computes something else."""


@dataclass
class KernelProofReport:
    """What really ran in one training step.

    Attributes:
        step: the batch that was watched, counted from 1; 0 while nothing was proved.
        how: ``"profiled"``: GPU kernels were recorded; ``"counted"``: calls were.
        ran: modules by feature, as ``(ran, asked for)``.
        backends: what computed attention; ways: how decoder blocks ran that were to run compiled or replayed.
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
    ways: tuple[str, ...] = ()
    missing: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    device_ms: float = 0.0
    skipped: str = ""

    def line(self) -> str:
        """``RMSNorm 57/57 · SwiGLU 28/28 · head+loss 1/1 · attention 28/28 varlen``."""
        how = {"attention": ", ".join(self.backends), "blocks": ", ".join(self.ways)}
        parts = [f"{name} {ran}/{asked} {how.get(name, '')}".rstrip() for name, (ran, asked) in self.ran.items()]
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
            "blocks": list(self.ways),
            "missing": list(self.missing),
            "idle": list(self.idle),
            "device_time_shares": dict(self.shares),
            "device_ms": self.device_ms,
            "skipped": self.skipped,
        }


@dataclass
class EquivalenceReport:
    """Plain against accelerated on the first batch.

    Attributes:
        agreement: the numbers; None where nothing was compared.
        part: which part of the step was compared, if not all of it; without_loss: why not up to its loss.
        seconds: what the comparison took.
        mismatch: what computed something else, with what was seen.
        switched_off: features that are off because of that.
        skipped: why nothing was compared, or ``""``.
    """

    agreement: Agreement | None = None
    part: str = ""
    without_loss: str = ""
    seconds: float = 0.0
    mismatch: str = ""
    switched_off: list[str] = field(default_factory=list)
    skipped: str = ""

    def line(self) -> str:
        found = self.agreement
        assert found is not None
        text = (
            f"{'loss' if not self.without_loss else 'a random product'} {found.loss[0]:.6g} plain, {found.loss[1]:.6g} accelerated; gradient norm {found.gradient_norm[0]:.4g} "
            f"and {found.gradient_norm[1]:.4g}, {found.gradient_difference:.1e} apart (plain's own rounding "
            f"{found.own_gradient:.1e})"
        )
        return text + (f"; furthest: {found.worst}, {found.worst_difference:.1e}" if found.worst else "")

    def rows(self) -> list[tuple[str, str, str]]:
        if self.agreement is None:
            return []
        return [
            (
                "Equivalence",
                f"first batch{self.part and ', '}{self.part}",
                f"DIFFERS: {self.mismatch}" if self.mismatch else self.line(),
            )
        ]

    def reasons(self) -> list[str]:
        lines = [f"Equivalence: not compared: {self.skipped}"] if self.skipped else []
        if self.without_loss and not self.skipped:
            lines.append(f"Equivalence: the loss was no part of it: {self.without_loss}")
        return lines + ([f"Equivalence: {self.mismatch}"] if self.mismatch else [])

    def to_dict(self) -> dict[str, Any]:
        return {
            "agreement": None if self.agreement is None else asdict(self.agreement),
            "part": self.part,
            "without_loss": self.without_loss,
            "seconds": self.seconds,
            "mismatch": self.mismatch,
            "switched_off": list(self.switched_off),
            "skipped": self.skipped,
        }


@dataclass
class ProofReport:
    """Both proofs of one training."""

    kernels: KernelProofReport = field(default_factory=KernelProofReport)
    equivalence: EquivalenceReport = field(default_factory=EquivalenceReport)

    def rows(self) -> list[tuple[str, str, str]]:
        kernels = [self.kernels.row()] if self.kernels.step and self.kernels.ran else []
        return [*kernels, *self.equivalence.rows()]

    def reasons(self) -> list[str]:
        return self.kernels.reasons() + self.equivalence.reasons()

    def to_dict(self) -> dict[str, Any]:
        return {"kernels": self.kernels.to_dict(), "equivalence": self.equivalence.to_dict()}


_MOST = 4


def _shortened(lines: list[str]) -> list[str]:
    """The first few; the rest is a number."""
    return lines if len(lines) <= _MOST else [*lines[: _MOST - 1], f"and {len(lines) - _MOST + 1} more"]
