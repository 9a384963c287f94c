"""Two ranks: as many steps on each, every sample once, and the same after interruptions on two ranks or on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import batches_worker
import pytest

HERE = Path(__file__).parent
# one launch of two processes, on a machine that may be busy
pytestmark = pytest.mark.timeout(400)


def launch(out: Path, part: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [str(HERE), str(HERE.parent), *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, str(HERE / "batches_worker.py"), str(out), part],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # one rank is this process: starting two others is most of the time it takes
    out = tmp_path_factory.mktemp("ranks")
    batches_worker.main(out, "single")
    launch(out, "whole,resumed,again,from_one,uneven,kinds")
    batches_worker.main(out, "from_two")
    return out


def seen(out: Path, name: str, ranks: int) -> list[list[Any]]:
    """``[step][rank]`` of ``(epoch, sample numbers, tokens)``."""
    each = [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
    assert len({len(rank) for rank in each}) == 1, "ranks must make as many steps as each other"
    return [list(step) for step in zip(*each, strict=True)]


def samples(steps: list[list[Any]]) -> list[int]:
    return [i for step in steps for _, numbers, _ in step for i in numbers]


def epoch(steps: list[list[Any]], number: int) -> list[list[Any]]:
    return [step for step in steps if step[0][0] == number]


def test_every_sample_once_on_two_ranks(runs: Path) -> None:
    steps = seen(runs, "whole", 2)
    for number in (0, 1):
        assert sorted(samples(epoch(steps, number))) == list(range(60))
    for step in steps:
        assert max(tokens for _, _, tokens in step) <= 64


def test_resumes_twice_on_two_ranks(runs: Path) -> None:
    whole = seen(runs, "whole", 2)
    assert seen(runs, "resumed", 2) == whole[4:]
    assert seen(runs, "again", 2) == whole[8:]


def test_goes_on_with_the_rest_on_another_number_of_ranks(runs: Path) -> None:
    """One rank, then two, then one: nothing of the first epoch is lost or doubled, and the second is whole."""
    one, two, last = seen(runs, "single", 1), seen(runs, "from_one", 2), seen(runs, "from_two", 1)
    first = samples(one[:4]) + samples(two[:2]) + samples(epoch(last, 0))
    assert sorted(first) == list(range(60))
    assert sorted(samples(epoch(last, 1))) == list(range(60))
    assert sorted(samples(one[:4]) + samples(epoch(two, 0))) == list(range(60))
    assert sorted(samples(epoch(two, 1))) == list(range(60))


def test_a_stream_that_runs_dry_ends_the_epoch_for_all(runs: Path) -> None:
    """Rank 1 has 15 samples to rank 0's 40: it trains on all of them, and nobody hangs."""
    for number in (0, 1):
        steps = epoch(seen(runs, "uneven", 2), number)
        assert sorted(i for step in steps for i in step[1][1]) == list(range(15))
        first = [i for step in steps for i in step[0][1]]
        assert 0 < len(first) == len(set(first)) < 40


@pytest.mark.parametrize(("name", "count"), [("batch_sampler", 60), ("own", 61), ("stateful", 60), ("kept", 60)])
def test_samplers_of_the_users_are_divided(runs: Path, name: str, count: int) -> None:
    ranks = [json.loads((runs / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1])
    for number in (0, 1):
        drawn = [i for rank in ranks for epoch, numbers in rank if epoch == number for i in numbers]
        assert sorted(drawn) == list(range(count))
    if name == "kept":
        assert len(ranks[0]) == 2 * 8, "60 samples in batches of 4 on 2 ranks"


def test_a_sampler_with_replacement_draws_once_for_all_ranks(runs: Path) -> None:
    ranks = [json.loads((runs / f"weighted.{rank}.json").read_text()) for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1])
    for number in (0, 1):
        drawn = [i for rank in ranks for epoch, numbers in rank if epoch == number for i in numbers]
        assert len(drawn) == 60 and max(drawn.count(i) for i in drawn) > 1


@pytest.mark.parametrize("strategy", ["liger_fsdp", "deepspeed"])
def test_strategies_with_checkpoints_of_their_own(runs: Path, strategy: str) -> None:
    if not (runs / f"{strategy}.0.json").exists():
        pytest.skip(f"needs {strategy}")
    whole = seen(runs, strategy, 2)
    assert [sorted(samples(epoch(whole, e))) for e in (0, 1)] == [list(range(60))] * 2
    assert seen(runs, f"{strategy}_resumed", 2) == whole[3:]


def test_streams_are_resumed_each_where_it_was(runs: Path) -> None:
    assert seen(runs, "stream_resumed", 2) == seen(runs, "stream", 2)[3:]
