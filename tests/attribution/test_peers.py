"""Other frameworks on the work of a suite: the same batches and the same losses as plain, or a row that says why not."""

from __future__ import annotations

import functools
from multiprocessing import Pipe

import pytest

from lightning_liger.bench import gsm8k, peers, worker
from lightning_liger.bench.job import as_job
from lightning_liger.bench.messages import GO, STOP, Done, Plan, Ready, Turn
from lightning_liger.bench.results import Comparison, Row
from lightning_liger.bench.schedule import Schedule
from lightning_liger.bench.showing import show
from lightning_liger.bench.turns import Turns
from lightning_liger.bench.variants import AS_PADDED, PLAIN, Variant

HERE = Ready("cpu", "cpu", "32-true")
PLAN = Plan(warmup=1, steps=1, turns=1, trainer={"accelerator": "cpu"})
TOKENS = 700
build = functools.partial(gsm8k.build, "tiny")


def trained(variant: Variant) -> Row:
    """One run in this process, told what to do beforehand."""
    ours, theirs = Pipe()
    for message in (GO, GO, STOP):
        ours.send(message)
    outcome = (worker._run_peer if variant.peer else worker._run)(build, variant, PLAN, Turns(theirs, PLAN))
    assert isinstance(outcome, Done), outcome
    ready, first, second = (ours.recv() for _ in range(3))
    assert isinstance(ready, Ready) and isinstance(first, Turn) and isinstance(second, Turn)
    row = Row(variant, ready.precision)
    row.add_warm_up(first)
    row.add_turn(second)
    row.end(outcome)
    return row


@pytest.fixture(scope="module")
def plain() -> Row:
    return trained(PLAIN)


@pytest.mark.parametrize("name", [v.name for v in peers.variants(peers.PEERS, HERE, TOKENS)])
def test_a_peer_trains_the_same(name: str, plain: Row) -> None:
    variant = next(v for v in peers.variants(peers.PEERS, HERE, TOKENS) if v.name == name)
    if variant.skipped:
        pytest.skip(f"{name}: {variant.skipped}")
    row = trained(variant)
    result = Comparison(PLAN, [plain, row])
    assert result.problems() == []
    if variant.same_batches:
        assert result.same_batches(row) and [t.tokens for t in row.turns] == [t.tokens for t in plain.turns]
        assert (result.deviation(row) or 0.0) <= 1e-6
        assert row.turns[0].flops == plain.turns[0].flops
    else:
        (tokens,) = row.turns[0].tokens or ()
        assert 0.9 * TOKENS < tokens <= TOKENS
        assert result.deviation(row) is None and "own batches" in show(result)


def test_what_cannot_run_here_is_a_row() -> None:
    rows = [Row(variant) for variant in peers.variants(("trainer",), HERE, AS_PADDED)]
    missing = next(row for row in rows if row.name == "Trainer Liger")
    result = Comparison(PLAN, [Row(PLAIN), missing])
    assert result.problems() == []
    text = show(result)
    assert "not here" in text and "Trainer Liger is not measured: " in text and "CUDA device" in text


def test_a_packed_row_holds_as_much_as_the_largest_padded_batch(plain: Row) -> None:
    schedule = Schedule(build, lambda ready: [], PLAN)
    schedule.result.rows = [plain]
    packed = Variant("packed", "", None, peer="trl", same_batches=False, arguments={"tokens": AS_PADDED})
    assert schedule._with_budget(packed).arguments == {"tokens": plain.largest}


def test_more_steps_than_there_is_data_for() -> None:
    task = as_job(build()).task
    assert task is not None and [len(batch) for batch in task.batches(2)] == [8, 8]
    with pytest.raises(ValueError, match="of which 100000 are needed: ask for fewer steps"):
        task.batches(100_000)
