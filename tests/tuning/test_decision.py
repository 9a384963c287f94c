"""Which plan wins, given what each costs."""

from __future__ import annotations

from lightning_liger.tuning.decision import Cost, Decision, Plan, fastest

PLAIN, KERNELS, COMPILED, RECORDED = Plan(), Plan(("rope", "swiglu")), Plan((), True), Plan((), True, True)
GB = 1 << 30


def test_the_fastest_wins() -> None:
    costs = {PLAIN: Cost(5.0, GB), KERNELS: Cost(6.0, GB), COMPILED: Cost(3.0, GB)}
    assert fastest(costs, 10, 100 * GB) == COMPILED
    assert fastest({**costs, COMPILED: Cost(3.0, GB, "its results are off")}, 10, 100 * GB) == PLAIN


def test_within_two_per_cent_memory_and_then_simplicity_decide() -> None:
    assert fastest({PLAIN: Cost(5.0, 2 * GB), KERNELS: Cost(5.05, GB), COMPILED: Cost(5.2, GB)}, 1, GB) == KERNELS
    assert fastest({PLAIN: Cost(5.0, GB), COMPILED: Cost(4.95, GB)}, 1, GB) == PLAIN
    assert fastest({COMPILED: Cost(5.0, GB), RECORDED: Cost(4.95, GB), PLAIN: Cost(9.0, GB)}, 1, 99 * GB) == COMPILED


def test_what_does_not_fit_is_not_taken() -> None:
    costs = {PLAIN: Cost(5.0, GB), COMPILED: Cost(3.0, 2 * GB)}
    assert fastest(costs, 10, 19 * GB) == PLAIN
    assert fastest(costs, 10, 20 * GB) == COMPILED
    # the plain block need not fit either
    costs = {PLAIN: Cost(3.0, 2 * GB), KERNELS: Cost(5.0, GB)}
    assert fastest(costs, 10, 9 * GB) == KERNELS


def test_a_recording_keeps_its_memory() -> None:
    costs = {PLAIN: Cost(5.0, GB), COMPILED: Cost(4.0, GB), RECORDED: Cost(2.0, GB)}
    assert fastest(costs, 10, 30 * GB) == RECORDED
    assert fastest(costs, 10, 29 * GB) == COMPILED


def test_a_decision_survives_its_file() -> None:
    made = Decision(KERNELS, {"as they are": 5.0}, {"compiled": "no compiler"}, 3.5)
    again = Decision.from_dict(made.to_dict())
    assert (again.plan, again.costs, again.problems, again.from_disk) == (KERNELS, made.costs, made.problems, True)
    assert again.describe() == "kernels (rope, swiglu); ms per block: as they are 5.00 (timed in an earlier run)"
