"""Which candidate is taken, given what each of them costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# What a further mechanism must be worth; below that the one with less memory, and then the simpler one, is taken.
_WORTH = 0.02


@dataclass(frozen=True)
class Plan:
    """How the blocks of a stack run.

    Attributes:
        ops: the kernels that are used where they are bound.
        compiled: whether blocks run on compiled code; kernels inside of them are then not used.
        recorded: whether they are replayed as CUDA graphs.
    """

    ops: tuple[str, ...] = ()
    compiled: bool = False
    recorded: bool = False

    @property
    def name(self) -> str:
        base = "compiled" if self.compiled else f"kernels ({', '.join(self.ops)})" if self.ops else "as they are"
        return f"{base} + CUDA graphs" if self.recorded else base

    @property
    def complexity(self) -> tuple[bool, bool, int]:
        return self.recorded, self.compiled, len(self.ops)


@dataclass(frozen=True)
class Cost:
    """Of one block, forward and backward.

    Attributes:
        ms: median milliseconds; infinite where it did not run.
        kept: bytes that are kept from the forward for the backward.
        problem: why it cannot be taken, or ``""``.
    """

    ms: float = float("inf")
    kept: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Decision:
    """The plan, and what led to it.

    Attributes:
        costs: milliseconds by name of the candidate; candidates that did not run are in ``problems``.
        seconds: what the timing took; 0 where it was known from an earlier run.
    """

    plan: Plan
    costs: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    from_disk: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Decision:
        """The reverse of :meth:`to_dict`.

        Raises:
            KeyError, TypeError, ValueError: not made by it.
        """
        plan = given["plan"]
        made = Plan(tuple(map(str, plan["ops"])), bool(plan["compiled"]), bool(plan["recorded"]))
        costs = {str(name): float(ms) for name, ms in given["costs"].items()}
        problems = {str(name): str(why) for name, why in given["problems"].items()}
        return Decision(made, costs, problems, float(given["seconds"]), True)

    def describe(self) -> str:
        """One line: the plan and all numbers."""
        if not self.costs:
            return self.plan.name
        times = ", ".join(f"{name} {ms:.2f}" for name, ms in sorted(self.costs.items(), key=lambda item: item[1]))
        took = "timed in an earlier run" if self.from_disk else f"timed in {self.seconds:.0f} s"
        return f"{self.plan.name}; ms per block: {times} ({took})"


def fastest(costs: Mapping[Plan, Cost], blocks: int, free: int) -> Plan:
    """The fastest plan that fits; among those within 2% of it the one with the least memory, then the simplest.

    Args:
        costs: of one block; the plan without anything is among them.
        blocks: how many there are, all of which keep their activations at the same time.
        free: bytes that could still be allocated. What keeps least always fits: it has to.
    """
    right = {plan: cost for plan, cost in costs.items() if not cost.problem}
    least = min((cost.kept for cost in right.values()), default=0)
    possible = {p: c for p, c in right.items() if c.kept <= least * 1.02 or c.kept * blocks <= free}
    # a recording keeps its activations for good, so that nothing else can use their memory
    possible = {p: c for p, c in possible.items() if not p.recorded or c.kept * blocks <= free // 3}
    if not possible:
        return Plan()
    best = min(cost.ms for cost in possible.values())
    close = [plan for plan, cost in possible.items() if cost.ms <= best * (1 + _WORTH)]
    tenth = max(1, max(possible[p].kept for p in close) // 10)
    return min(close, key=lambda p: (possible[p].kept // tenth, p.complexity, possible[p].ms))
