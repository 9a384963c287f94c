"""The longest document that trains: the search, a process that runs out of memory and goes on, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_liger.bench.long.rungs import KEYS, rungs
from lightning_liger.bench.long.search import Attempt, Longest, longest
from lightning_liger.cli import main
from lightning_liger.settings import Settings


def _search(capacity: int, start: int, hint: int = 0, seconds: float = 0.0, **options: float) -> tuple[Longest, int]:
    def attempt(tokens: int) -> Attempt:
        return Attempt(tokens, tokens <= capacity, "out of memory", seconds=seconds * tokens**2)

    bounds = {"least": 1024, "most": 2**21, **options}
    found = longest(attempt, start, hint=hint, **bounds)  # type: ignore[arg-type]
    return found, 0 if found.best is None else found.best.tokens


@pytest.mark.parametrize("start", [1024, 8192, 65536, 10**6])
@pytest.mark.parametrize("capacity", [1024, 5000, 16384, 40000, 999_999])
def test_the_search_ends_within_an_eighth(capacity: int, start: int) -> None:
    found, best = _search(capacity, start)
    assert best <= capacity < max(best * 1.125, best + 1024) + 1024
    assert found.bounded == "memory" and len(found.attempts) <= 16
    assert len({a.tokens for a in found.attempts}) == len(found.attempts)


def test_a_hint_saves_attempts() -> None:
    without, _ = _search(500_000, 8192)
    with_hint, best = _search(500_000, 8192, hint=480_000)
    assert len(with_hint.attempts) < len(without.attempts) and best >= 480_000 - 1024


def test_nothing_fits_and_everything_fits() -> None:
    nothing, best = _search(500, 8192)
    assert (best, nothing.bounded) == (0, "memory") and nothing.attempts[-1].tokens == 1024
    everything, best = _search(2**30, 8192, most=65536)
    assert (best, everything.bounded) == (65536, "limit")


def test_time_ends_the_search_as_well() -> None:
    # a step of 100,000 tokens takes 10 seconds
    found, best = _search(2**30, 8192, seconds=1e-9, step_seconds=10.0)
    assert found.bounded == "time" and 88_000 <= best <= 100_000


def test_a_failure_that_is_not_of_memory_ends_it() -> None:
    found = longest(lambda n: Attempt(n, False, "TypeError: no", failed=True), 8192, least=1024, most=2**20)
    assert found.bounded == "failure" and len(found.attempts) == 1 and found.best is None


def test_every_rung_has_one_feature_more() -> None:
    made = rungs(cuda=True)
    assert [r.key for r in made] == ["plain", *KEYS]
    for rung in made[1:]:
        Settings(**dict(rung.options or {}))
    assert made[-1].strategy == {"activation_checkpointing": "full", "activation_offload": True}
    assert made[-2].options is not None and made[-2].options["tiled_mlp"] is True
    assert [r.key for r in rungs(cuda=False)] == ["plain", "head", "padding", "checkpointing", "tiled"]
    assert rungs(("tiled",), cuda=False)[1].strategy is None


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--only", "900b"], "--only 900b: --suite long has 0.5b, 7b, tiny"),
        (["--features", "magic"], "--features magic: no feature 'magic' of --suite long; there are kernels, head"),
        (["--memory", "0"], "--memory 0: must be more than 0"),
        (["--step-limit", "-1"], "--step-limit -1: must be more than 0"),
        (["--peers", "all"], "--peers all: is not about --suite long"),
        (["--max-tokens", "4"], "--max-tokens 4: is not about --suite long"),
    ],
)
def test_a_wrong_command_line(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "long", *options]) == 2
    assert complaint in capsys.readouterr().err


# a process that imports Lightning and trains a dozen times, two steps each
def test_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--only", "tiny", "--memory", "0.03", "--longest", "2048", "--features", "head,checkpointing"]
    command = ["bench", "--suite", "long", *options, "--accelerator", "cpu", "--json", "--output", str(tmp_path)]
    assert main(command) == 0
    (result,) = json.loads(capfd.readouterr().out)
    assert [r["name"] for r in result["rungs"]] == ["plain", "+fused head", "+checkpointing"]
    plain, head, recomputed = result["rungs"]
    assert 64 <= plain["longest"] < head["longest"] <= recomputed["longest"] <= 2048
    for rung in (plain, head):
        assert rung["bounded_by"] == "memory"
        assert any(a["what"] == "out of memory" for a in rung["attempts"])
    at_plain = [next(a for a in r["attempts"] if a["tokens"] == plain["longest"]) for r in result["rungs"]]
    assert at_plain[0]["peak_memory"] > at_plain[1]["peak_memory"]
    assert all(abs(a["loss"] - at_plain[0]["loss"]) <= 1e-5 * at_plain[0]["loss"] for a in at_plain)
    text = (tmp_path / "long.txt").read_text()
    assert "longest, tokens" in text and "+checkpointing" in text
    assert (tmp_path / "long.png").stat().st_size > 10_000
