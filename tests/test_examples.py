"""Every example runs on a CPU, gains something, and leaves the losses as they are. One small model serves them all."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from docstrings import docstring_pairs
from lightning_liger.cli.training import cli_main
from small_model import SmallModel, save_small_model

EXAMPLES = Path(__file__).parent.parent / "examples"
# what the promise is about: modules and data that anybody could have written
USERS_OWN = "sft_module sft_data dpo_module kto_module reward_module lora_module gpt_module preference_data"
USERS_OWN += " streaming_data held_out"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``docstrings.jsonl`` and ``small_model``, as ``python small_model.py`` leaves them."""
    directory = tmp_path_factory.mktemp("given") / "demo_output"
    directory.mkdir()
    pairs = docstring_pairs()[::20]
    lines = (json.dumps(pair) + "\n" for pair in pairs)
    (directory / "docstrings.jsonl").write_text("".join(lines), encoding="utf-8")
    texts = (text for pair in pairs for text in pair.values())
    save_small_model(texts, SmallModel(1, 128, 512, 512), directory / "small_model")
    return directory


def run(example: str, given: Path, tmp_path: Path, *more: str) -> int:
    argv = ["--max-steps", "3", "--batch-size", "4", "--max-length", "256", "--output", str(tmp_path / "out")]
    argv += ["--data", str(given / "docstrings.jsonl"), "--model", str(given / "small_model"), *more]
    code: int = importlib.import_module(example).main(argv)
    return code


def positions_saved(output: str) -> int:
    return int(re.search(r"Never computed: (\d+)% of all positions", output)[1])  # type: ignore[index]


@pytest.mark.parametrize("name", USERS_OWN.split())
def test_the_users_own_code_knows_nothing_of_us(name: str) -> None:
    for node in ast.walk(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert "liger" not in ast.unparse(node)


@pytest.mark.parametrize("example", ["dpo", "kto", "reward_model", "own_model", "continue_pretraining"])
def test_an_example_gains_and_keeps_its_losses(
    example: str, given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(example, given, tmp_path) == 0  # 1 where losses differ
    output = capsys.readouterr().out
    assert "Padding removal" in output
    assert "What it gained in 3 steps" in output
    assert positions_saved(output) >= 10


def test_litgpt(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("litgpt_module", given, tmp_path, "--layers", "1", "--hidden-size", "64") == 0
    output = capsys.readouterr().out
    if importlib.util.find_spec("litgpt") is None:
        assert "pip install --no-deps litgpt" in output
    else:
        assert positions_saved(output) >= 10


def test_lora_leaves_an_adapter_and_a_merged_model(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert run("lora", given, tmp_path, "--rank", "4", "--lr", "0.01") == 0
    assert positions_saved(capsys.readouterr().out) >= 10
    load = AutoModelForCausalLM.from_pretrained
    adapted = PeftModel.from_pretrained(load(given / "small_model"), tmp_path / "out" / "adapter")
    ids = torch.arange(3, 20)[None]
    merged = load(tmp_path / "out" / "merged")(ids).logits
    torch.testing.assert_close(merged, adapted(ids).logits, rtol=1e-5, atol=1e-5)
    assert (merged - load(given / "small_model")(ids).logits).abs().max() > 1e-3


def test_a_stream_in_batches_by_tokens(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("continue_pretraining", given, tmp_path, "--max-tokens-per-batch", "400") == 0
    output = capsys.readouterr().out
    assert "1 stream" in output and "400 tokens" in output


def test_evaluating_right_after_training(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from held_out import final_answer, kind_pairs

    rows = kind_pairs()[::10]
    (tmp_path / "kinds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ["--data", str(tmp_path / "kinds.jsonl"), "--limit", "12", "--tasks", "gsm8k", "--max-steps", "40"]
    have = any(importlib.util.find_spec(name) for name in ("lm_eval", "evalscope"))
    options = options[:-4] + options[-2:] if have else options
    assert run("evaluate", given, tmp_path, *options, "--lr", "0.01") == (0 if have else 1)
    output = capsys.readouterr().out
    told = int(re.search(r"exact match (\d+)% of 12 held-out", output)[1])  # type: ignore[index]
    assert have or "pip install 'lm-eval[hf]'" in output

    # the same questions, asked of the exported checkpoint one by one
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "exported")
    right = 0
    for row in rows[::10][:12]:
        ids = tokenizer(row["question"] + "\n", return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        right += final_answer(tokenizer.decode(made, skip_special_tokens=True)) == row["answer"]
    assert told == round(100 * right / 12)
    assert final_answer("It is 3 + 4 = 7.\n#### 1,007 ") == final_answer("#### 1007") == "1007"


def test_the_fallback(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import deepspeed_fallback

    assert run("deepspeed_fallback", given, tmp_path) == 0
    output = capsys.readouterr().out
    assert "strategy='liger_fsdp': FSDP2 runs here" in output
    assert "Sharding (FSDP2)" in output
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match=r"--deepspeed 2: .*(not installed|CUDA device)"):
            deepspeed_fallback.choose(2)
    monkeypatch.setattr(deepspeed_fallback, "why_not_fsdp2", lambda: "torch 2.3 has no fully_shard")
    monkeypatch.setattr(deepspeed_fallback, "why_not_deepspeed", lambda: "")
    assert deepspeed_fallback.choose(None) == ("deepspeed_stage_2", "torch 2.3 has no fully_shard")
    assert deepspeed_fallback.choose(3) == ("deepspeed_stage_3", "asked for")


@pytest.fixture
def beside(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the files of cli/ need, with the small model and data at their place."""
    for name in ("cli", "multi_node"):
        shutil.copytree(EXAMPLES / name, tmp_path / name)
    shutil.copytree(given, tmp_path / "demo_output")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    return tmp_path


@pytest.mark.parametrize("name", ["sft", "lora", "dpo", "long_context"])
def test_a_configuration_file_trains(name: str, beside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--trainer.max_steps=2", "--data.max_length=96", "--trainer.enable_progress_bar=false"]
    cli = cli_main(args=["fit", "--config", f"cli/{name}.yaml", *small])
    assert cli.trainer.global_step == 2
    assert "Sharding (FSDP2)" in capsys.readouterr().out
    (saved,) = beside.rglob("*.ckpt")
    weights = torch.load(saved, weights_only=False)["state_dict"]
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert (name == "lora") == all("lora_" in key for key in weights)


@pytest.mark.parametrize("name", ["sft", "lora", "dpo", "long_context"])
def test_the_gpu_file_fits_behind_each(name: str, beside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli_main(args=["fit", "--config", f"cli/{name}.yaml", "--config", "cli/gpu.yaml", "--print_config"])
    assert stopped.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["accelerator"] == "cuda"
    assert printed["model"]["init_args"]["model"] == printed["data"]["init_args"]["tokenizer"]
    assert printed["model"]["init_args"]["model"].startswith("Qwen/")


def shell(script: Path, *more: str, **env: str) -> subprocess.CompletedProcess[Any]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    paths = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])
    env = {**os.environ, "PATH": path, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(["bash", str(script), *more], capture_output=True, text=True, timeout=150, env=env)


def test_torchrun_starts_every_rank_of_a_node(beside: Path) -> None:
    small = ["--trainer.max_steps=1", "--data.max_length=64", "--data.batch_size=2"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    result = shell(
        beside / "multi_node" / "torchrun.sh",
        *("--config", "cli/long_context.yaml", "--trainer.strategy.init_args.sequence_parallel_size=2", *small),
        GPUS="2",
        MASTER_PORT=port,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "each over 2 ranks" in result.stdout and "1 batch on 2 ranks" in result.stdout


def test_slurm_hands_its_sizes_on(beside: Path) -> None:
    fake = beside / "bin"
    fake.mkdir()
    (fake / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (fake / "srun").chmod(0o755)
    sizes = {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8", "SLURM_SUBMIT_DIR": str(beside)}
    path = os.pathsep.join([str(fake), os.environ["PATH"]])
    command = ["bash", str(beside / "multi_node" / "slurm.sh"), "--config", "cli/sft.yaml"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **sizes, "PATH": path}
    )
    assert result.stdout.split() == [
        "--kill-on-bad-exit=1",
        "lightning-liger",
        "fit",
        "--config",
        "cli/sft.yaml",
        "--trainer.num_nodes=2",
        "--trainer.devices=8",
    ]
    lines = (beside / "multi_node" / "slurm.sh").read_text(encoding="utf-8").splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(i < first_command for i, line in enumerate(lines) if line.startswith("#SBATCH"))
