"""The way that blocks run is found by timing on the first batch, and the same training comes out whatever it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Plain, assert_engaged, assert_same, causal_lm, collate, documents, fit, loader

from lightning_liger import LigerCallback, Settings, accelerate
from lightning_liger.compilation.block import CompiledBlock, Graphs
from lightning_liger.proof.report import ProofError
from lightning_liger.tuning import blocks, candidates, store
from lightning_liger.tuning.decision import Cost, Plan


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A CPU counts as a device worth timing, and nothing is kept in the user's cache."""
    monkeypatch.setattr(blocks, "can_time", lambda device=None: True)
    monkeypatch.setattr(blocks, "_BACKEND", "aot_eager")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    torch._dynamo.reset()


def _prefer(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> list[Mapping[Plan, Cost]]:
    seen: list[Mapping[Plan, Cost]] = []

    def choose(costs: Mapping[Plan, Cost], number: int, free: int) -> Plan:
        seen.append(dict(costs))
        return plan

    monkeypatch.setattr(candidates, "fastest", choose)
    return seen


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_blocks_are_compiled_where_that_is_fastest(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    seen = _prefer(monkeypatch, Plan((), True))
    plain = fit(Plain(causal_lm(kind)), loader())
    module = Plain(causal_lm(kind))
    ours = fit(module, loader(), LigerCallback(verbose=False))
    assert_same(plain, ours)
    assert_engaged(ours)
    ((cost, compiled),) = [tuple(costs.values()) for costs in seen]
    assert cost.problem == compiled.problem == ""
    assert 0 < cost.ms < 1e4
    assert 0 < compiled.ms < 1e4
    report = ours.report["decoder_blocks"]
    assert (report["applied"], report["found"], report["off"]) == (2, 2, [])
    assert report["decided"].startswith("compiled; ms per block: ")
    assert "(timed in " in report["decided"]
    assert not any("forward" in vars(m) for m in module.modules())


def test_the_next_run_finds_the_decision_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _prefer(monkeypatch, Plan((), True))
    reports = [
        fit(Plain(causal_lm()), loader(), LigerCallback(verbose=False)).report["decoder_blocks"] for _ in range(2)
    ]
    assert len(seen) == 1
    assert "timed in an earlier run" in reports[1]["decided"]
    (file,) = store.directory().glob("*.json")
    known = json.loads(file.read_text())
    assert known["decision"]["plan"] == {"ops": [], "compiled": True, "recorded": False}
    file.write_text("{ not json")
    fit(Plain(causal_lm()), loader(), LigerCallback(verbose=False))
    assert len(seen) == 2


def test_blocks_stay_as_they_are_where_that_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    _prefer(monkeypatch, Plan())
    module = Plain(causal_lm())
    callback = LigerCallback(verbose=False)
    plain = fit(Plain(causal_lm()), loader())
    ours = fit(module, loader(), callback)
    assert_same(plain, ours)
    report = ours.report["decoder_blocks"]
    assert report["applied"] == 0
    assert report["decided"].startswith("as they are; ms per block: ")
    # batches are lengthened for the timing only
    assert ours.report["padding_free"]["shapes"] == 1


def test_timing_leaves_random_numbers_and_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _prefer(monkeypatch, Plan())
    model = causal_lm()
    accelerate(model, Settings())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert model(**collate(documents(4))).loss > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    _prefer(monkeypatch, Plan((), True))

    def make() -> Plain:
        model = causal_lm()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return Plain(model)

    plain = fit(make(), loader())
    ours = fit(make(), loader(), LigerCallback(verbose=False))
    assert_same(plain, ours)
    assert ours.report["decoder_blocks"]["applied"] == 2


def test_compiled_by_choice_without_any_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _prefer(monkeypatch, Plan())
    plain = fit(Plain(causal_lm()), loader())
    ours = fit(Plain(causal_lm()), loader(), LigerCallback(verbose=False, compile=True))
    assert_same(plain, ours)
    assert seen == []
    assert ours.report["decoder_blocks"]["decided"] == "compiled"


def test_without_a_trainer_the_second_call_is_the_first_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _prefer(monkeypatch, Plan((), True))
    model, plain = causal_lm(), causal_lm()
    accelerate(model, Settings())
    for step in range(3):
        batch = collate(documents(4, seed=step))
        found, wanted = (m(**batch).loss.detach() for m in (model, plain))
        assert float(found) == pytest.approx(float(wanted), rel=1e-5)
        bound = sum(isinstance(vars(m).get("forward"), CompiledBlock) for m in model.modules())
        assert bound == (0 if step == 0 else 2)


def test_what_cannot_be_timed_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no clock")

    monkeypatch.setattr(candidates, "measure", fail)
    ours = fit(Plain(causal_lm()), loader(), LigerCallback(verbose=False))
    assert_same(fit(Plain(causal_lm()), loader()), ours)
    assert ours.report["decoder_blocks"]["off"] == ["not timed: RuntimeError: no clock"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile": "always"}, "compile='always': expected one of 'auto', 'cudagraphs'"),
        ({"compile": True, "padding_free": False}, "compile=True is about batches without padding"),
    ],
)
def test_bad_values(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LigerCallback(**options)


def test_cuda_graphs_need_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BACKEND", "inductor")
    with pytest.raises(ValueError, match="compile='cudagraphs' needs a CUDA device"):
        fit(Plain(causal_lm()), loader(), LigerCallback(verbose=False, compile="cudagraphs"))


def test_sizes_that_are_met_seldom_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counting(module: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        made.append(1)
        return aot_eager(module, inputs)

    monkeypatch.setattr(blocks, "_BACKEND", counting)
    monkeypatch.setattr(blocks, "_PATIENCE", 2)
    _prefer(monkeypatch, Plan((), True))
    model, plain = causal_lm(), causal_lm()
    accelerate(model, Settings(shape_buckets=[64, 96, 128]))
    graphs = []
    for rows in (4, 4, 6, 6, 6, 6, 8, 8):
        batch = collate(documents(rows, seed=0))
        found, wanted = (m(**batch).loss.detach() for m in (model, plain))
        assert float(found) == pytest.approx(float(wanted), rel=1e-5)
        graphs.append(len(made))
    # the size of the timing at once, the second after two batches of it, the third not yet
    assert graphs == [1, 1, 1, 1, 2, 2, 2, 2]


def test_the_kernel_proof_counts_blocks_and_does_not_look_into_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A hook inside of a block would make it run as it is in the very step that is watched."""
    _prefer(monkeypatch, Plan((), True))
    callback = LigerCallback(verbose=False, verify="strict", profile=tmp_path / "trace", compile=True)
    proof = fit(Plain(causal_lm()), loader(), callback).report["proof"]["kernels"]
    assert (proof["step"], proof["how"], proof["missing"], proof["idle"]) == (3, "profiled", [], [])
    assert proof["ran"]["blocks"] == [2, 2]
    assert proof["blocks"] == ["compiled"]
    assert "blocks 2/2 compiled" in callback.report.proof.kernels.line()


def test_blocks_whose_batch_is_not_compiled_yet_are_idle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _prefer(monkeypatch, Plan((), True))
    monkeypatch.setattr(Graphs, "takes", lambda graphs, size: False)
    callback = LigerCallback(verbose=False, verify="strict", profile=tmp_path / "trace")
    proof = fit(Plain(causal_lm()), loader(), callback).report["proof"]["kernels"]
    assert (proof["ran"]["blocks"], proof["missing"]) == ([0, 2], [])
    assert proof["idle"][0].startswith("blocks on model.model.layers.0: batches of this size were too few")


def test_a_block_that_cannot_run_compiled_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal_lm("gemma2")  # its attention cannot be traced
    with pytest.raises(ProofError, match=r"blocks on model.model.layers.0: .*attention"):
        fit(Plain(model), loader(), LigerCallback(verbose=False, verify="strict", compile=True))


def test_the_first_table_says_from_when_on_blocks_run_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _prefer(monkeypatch, Plan((), True))
    monkeypatch.setenv("COLUMNS", "300")
    callback = LigerCallback()
    ours = fit(Plain(causal_lm()), loader(), callback)
    assert "2 of 2 blocks, from the next batch on" in capsys.readouterr().out
    assert (ours.report["decoder_blocks"]["applied"], ours.report["decoder_blocks"]["found"]) == (2, 2)
    assert callback.report.blocks.rows()[0][1] == "2 of 2 blocks"
