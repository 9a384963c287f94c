"""`lightning-liger inspect` on checkpoints, model types and modules; nothing is trained or downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_liger.cli import main
from lightning_liger.cli.models import make

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def inspected(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> str:
    assert main(["inspect", *options]) == code
    return capsys.readouterr().out


def test_a_model_type_and_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    module, notes = make("qwen2", {}, False)
    assert all(p.is_meta for p in module.parameters()) and notes == []
    found = json.loads(inspected(capsys, "qwen2", "--json"))
    assert found["class"] == "Qwen2ForCausalLM" and found["parameters"] == sum(p.numel() for p in module.parameters())
    assert found["report"]["padding_free"]["applied"] == found["report"]["fused_head"]["applied"] == 1
    text = inspected(capsys, "bloom", "--option", "fused_head=false", code=1)
    assert "Nothing would be accelerated" in text
    assert "BloomModel: its attention is not looked up" in text and "switched off (fused_head=False)" in text


def test_a_checkpoint_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from helpers import config

    config("gemma2").save_pretrained(tmp_path)
    for target in (tmp_path, tmp_path / "config.json"):
        assert "1 of 1 backbone (Gemma2Model)" in inspected(capsys, str(target))


def test_a_lightning_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from helpers import causal_lm

    causal_lm("qwen2").save_pretrained(tmp_path)
    arguments = json.dumps({"model": str(tmp_path), "lr": 0.1})
    target = f"{EXAMPLES / 'sft_module.py'}:SFTModule"
    found = json.loads(inspected(capsys, target, "--args", arguments, "--json"))
    assert found["class"] == "SFTModule" and found["models"] == ["Qwen2ForCausalLM"]
    assert found["report"]["padding_free"]["applied"] == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["qwen22"], "Did you mean 'qwen2'"),
        (["meta-llama/Llama-3.1-8B"], "Checkpoints of the Hub are not downloaded"),
        ([str(EXAMPLES)], "the directory has no config.json"),
        (
            [f"{EXAMPLES / 'sft_module.py'}:SFTModule"],
            "missing a required argument: 'model'. Give its arguments: --args",
        ),
        (["pathlib:Path"], "it made a PosixPath"),
        (["qwen2", "--args", "[1]"], "--args [1]: expected an object"),
        (["qwen2", "--option", "padding_fee=true"], "Did you mean 'padding_free'?"),
        (["qwen2", "--option", "kernels"], "--option kernels: expected NAME=VALUE"),
    ],
)
def test_what_cannot_be_inspected(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *options]) == 2
    assert complaint in capsys.readouterr().err
