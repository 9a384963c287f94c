"""What the user is told: the table after the first step, and the report for machines."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from helpers import QUIET, Plain, assert_engaged, both, causal_lm, collate, documents, fit, loader, real_tokens

from lightning_liger import LigerCallback, accelerate
from lightning_liger.kernels.registry import KernelBinding
from lightning_liger.patching import Switch
from lightning_liger.report import Report


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")


class Validating(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(**batch)


def test_report_for_machines() -> None:
    callback = LigerCallback(verbose=False)
    fit(Plain(causal_lm()), loader(), callback)
    report = json.loads(json.dumps(callback.report.to_dict()))
    batches = list(loader())
    positions = sum(b["input_ids"].numel() for b in batches)
    padding = report["padding_free"]
    assert padding["tokens"] == real_tokens(batches) < positions == padding["positions"]
    assert padding["padding_fraction"] == pytest.approx(1 - real_tokens(batches) / positions)
    assert (padding["applied"], padding["found"], padding["detail"]) == (1, 1, "(Qwen2Model)")
    assert padding["calls"] == padding["packed_calls"] == 4 and padding["extra_padded_runs"] == 0
    head = report["fused_head"]
    labelled = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    assert head["fused_calls"] == 4 and head["computed_rows"] == labelled
    assert head["skipped_fraction"] == pytest.approx(1 - labelled / head["rows"])
    assert (head["applied"], head["found"], head["materialised_by"]) == (1, 1, {})
    assert report["nothing_to_accelerate"] is False and report["notes"] == []
    assert {"liger/tokens_per_second", "liger/mfu", "liger/peak_memory_gb"} <= set(report["metrics"])


def test_nothing_is_off_when_all_went_well() -> None:
    _, ours = both(lambda: Plain(causal_lm()), lambda: loader())
    assert ours.report["padding_free"]["off"] == ours.report["fused_head"]["off"] == []


@pytest.mark.parametrize("rich", [True, False])
def test_table_is_printed_once_with_the_first_step_only(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setitem(sys.modules, "rich.console", None)
        monkeypatch.setitem(sys.modules, "rich.table", None)
    fit(Validating(causal_lm()), loader(), LigerCallback(), val=loader(), num_sanity_val_steps=2, max_epochs=2)
    out = capsys.readouterr().out
    first = next(iter(loader()))
    positions, tokens = first["input_ids"].numel(), real_tokens([first])
    labelled = int((first["labels"][:, 1:] != -100).sum())
    assert out.count("lightning-liger") == 1
    assert ("┏" in out) == rich
    assert "1 of 1 backbone (Qwen2Model)" in out and "1 of 1 head (torch)" in out
    assert f"{1 - tokens / positions:.0%} of {positions} positions were padding; removed" in out
    assert f"{labelled} of " in out and "head rows computed" in out
    for column in ("feature", "applied to", "first training step"):
        assert out.count(column) == 1


def test_a_second_fit_prints_again_and_verbose_false_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    callback = LigerCallback()
    for _ in range(2):
        fit(Plain(causal_lm()), loader(), callback, max_steps=1)
    assert capsys.readouterr().out.count("head rows computed") == 2
    fit(Plain(causal_lm()), loader(), LigerCallback(verbose=False), max_steps=1)
    assert capsys.readouterr().out == ""


def test_the_table_leaves_a_progress_bar_whole(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Plain(causal_lm()), loader(), LigerCallback(), enable_progress_bar=True)
    captured = capsys.readouterr()
    lines = captured.out.replace("\r", "\n").splitlines()
    title = [line for line in lines if "lightning-liger" in line]
    assert len(title) == 1 and title[0].strip() == "lightning-liger"
    for line in lines:
        assert not ("┃" in line and "Epoch" in line), line


def test_an_ascii_terminal_gets_an_ascii_table(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    fit(Plain(causal_lm()), loader(), LigerCallback(), max_steps=1)
    out = raw.getvalue().decode("ascii")
    assert "| Padding removal" in out and "?" not in out


def test_validation_alone_is_reported_too() -> None:
    callback = LigerCallback(verbose=False)
    L.Trainer(callbacks=[callback], **QUIET).validate(Validating(causal_lm()), loader(), verbose=False)
    assert callback.report.padding.packed_calls == 4


class ReadsLogits(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model(**batch)
        # needs all of them at once: no row-by-row reader will ever serve it
        self.log("largest", torch.linalg.svdvals(out.logits.detach()).max())
        return out.loss


def test_reading_logits_is_named_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    plain, ours = both(lambda: ReadsLogits(causal_lm()), loader)
    assert_engaged(ours)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    sites = ours.report["fused_head"]["materialised_by"]
    assert list(sites) == ["linalg_svdvals"] and "test_report.py" in sites["linalg_svdvals"], sites


def test_refusals_name_the_architecture_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def bloom() -> Any:
        small = transformers.BloomConfig(
            vocab_size=97,
            hidden_size=32,
            n_layer=2,
            n_head=4,
            pad_token_id=0,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        torch.manual_seed(0)
        return Plain(transformers.BloomForCausalLM(small))

    plain, ours = fit(bloom(), loader()), fit(bloom(), loader(), LigerCallback())
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_engaged(ours, packed=False)
    out = capsys.readouterr().out
    assert "0 of 1 backbone" in out and "positions were padding; kept" in out
    assert out.count("BloomModel") == 1
    assert ours.report["padding_free"]["tokens"] == real_tokens(loader()), "tokens are counted all the same"


def test_accelerate_alone_reports_without_a_trainer() -> None:
    model = causal_lm()
    handle = accelerate(model)
    model(**collate(documents(4))).loss.backward()
    assert "removed" in handle.report.render()
    handle.revert()


def test_a_kernel_that_first_ran_unnoticed_counts_when_it_runs_again() -> None:
    report = Report()
    op = report.kernels.op("rms_norm", "RMSNorm", ())
    op.applied = 1
    binding = KernelBinding(torch.nn.Identity(), Switch(), None, op, {})
    with report.unnoticed():
        binding.ran()
    assert (op.called, op.calls, binding.has_run) == (0, 0, False)
    binding.ran()
    assert (op.called, op.calls, op.activity()) == (1, 1, "1 calls")
