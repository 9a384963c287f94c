"""What happened to each kind of kernel: on how many modules it is, how often it ran, and why it is not elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class OpReport:
    """One op (``"rms_norm"``); plain Python numbers, so that counting never waits for a device.

    Attributes:
        title: the name that people read, ``"RMSNorm"``.
        found: modules that look like this op.
        applied: modules that run the kernel.
        sources: how many of them Liger knows by architecture (``"liger"``) and how many by structure alone.
        ran_on: numbers of the bindings whose kernel ran at least once; copies share the number of their original.
        calls: forward calls that ran the kernel.
        original_calls: forward calls that ran the module's own code instead, by reason.
        kernels: names, or parts of names, of the GPU kernels that a profiler sees when the op ran.
        refused: reasons with the number of modules, ``{"LlamaMLP: …": 2}``.
        resting: on how many modules it is bound and not used, and why.
    """

    title: str
    found: int = 0
    applied: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    ran_on: set[int] = field(default_factory=set)
    calls: int = 0
    original_calls: dict[str, int] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    refused: dict[str, int] = field(default_factory=dict)
    resting: tuple[int, str] = (0, "")

    def __deepcopy__(self, memo: dict[int, Any]) -> OpReport:
        return self

    @property
    def called(self) -> int:
        """Modules whose kernel ran at least once."""
        return len(self.ran_on)

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def rests(self, reason: str) -> None:
        """One module more that it is not used on, or one less."""
        number, known = self.resting
        self.resting = (number + 1, reason) if reason else (number - 1, known)

    def ran_original(self, reason: str) -> None:
        self.original_calls[reason] = self.original_calls.get(reason, 0) + 1

    def activity(self) -> str:
        """``"62 calls"``, and how many modules had none; a patch of somebody else's may count calls alone."""
        if not self.calls:
            return "not called yet"
        idle = max(0, self.applied - self.called) if self.called else 0  # copies are counted with the original
        return f"{self.calls:,} calls" + (f"; {idle} not called" if idle else "")

    def to_dict(self) -> dict[str, Any]:
        return {
            "applied": self.applied,
            "found": self.found,
            "sources": dict(self.sources),
            "called": self.called,
            "calls": self.calls,
            "original_calls": dict(self.original_calls),
            "kernels": list(self.kernels),
            "refused": dict(self.refused),
            "resting": {self.resting[1]: self.resting[0]} if self.resting[0] else {},
        }


@dataclass
class KernelReport:
    """All ops of one accelerated module.

    Attributes:
        off: why no kernel at all was looked for, or ``""``.
        ops: by settings key, in the order of the registry.
    """

    off: str = ""
    ops: dict[str, OpReport] = field(default_factory=dict)

    @property
    def applied(self) -> int:
        return sum(op.applied for op in self.ops.values())

    def op(self, name: str, title: str, kernels: tuple[str, ...]) -> OpReport:
        """The report of one op, made on first use; patches that share an op share it."""
        report = self.ops.setdefault(name, OpReport(title))
        report.kernels += tuple(k for k in kernels if k not in report.kernels)
        return report

    def restart(self) -> None:
        """Count calls from here on."""
        for op in self.ops.values():
            op.calls = 0
            op.original_calls.clear()

    def rows(self) -> list[tuple[str, str, str]]:
        """``(feature, where, what it did)`` for the table; ops that no module looks like are left out."""
        rows = [("Kernels", "off", self.off)] if self.off else []
        for op in self.ops.values():
            if op.found:
                known = ", ".join(f"{n} {source}" for source, n in sorted(op.sources.items()))
                where = f"{op.applied}/{op.found}" + (f" ({known})" if known else "")
                rows.append((op.title, where, op.activity()))
        return rows

    def reasons(self) -> list[str]:
        lines = []
        for op in self.ops.values():
            lines += [f"{op.title}: {_times(n)}{reason}" for reason, n in op.refused.items()]
            if op.resting[0]:
                lines.append(f"{op.title}: {_times(op.resting[0])}{op.resting[1]}")
            lines += [f"{op.title}: {n} call(s) ran the original code: {r}" for r, n in op.original_calls.items()]
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {"off": self.off, "applied": self.applied, "ops": {k: op.to_dict() for k, op in self.ops.items()}}


def _times(n: int) -> str:
    return f"{n}× " if n > 1 else ""
