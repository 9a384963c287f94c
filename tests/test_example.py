"""The example is what a newcomer runs first: its data, its errors, and its promise that the module knows nothing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docstrings import docstring_pairs
from finetune import parse
from sft_data import DataError, Pair, encode, read_pairs, train_tokenizer
from sft_module import SFTDataModule

EXAMPLES = Path(__file__).parent.parent / "examples"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def finetune(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "finetune.py"), "--output", str(tmp_path / "out"), *options],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_users_files_import_nothing_of_ours() -> None:
    for name in ("sft_module.py", "sft_data.py"):
        for node in ast.walk(ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))):
            imported = [node.module] if isinstance(node, ast.ImportFrom) else getattr(node, "names", [])
            assert not [n for n in imported if "liger" in str(getattr(n, "name", n))], name


def test_each_shape_of_row(tmp_path: Path) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
    path = write(
        tmp_path / "rows.jsonl",
        {"question": "Why?", "answer": "Because.", "source": "kept out"},
        "",
        {"prompt": "Once upon ", "completion": "a time"},
        {"messages": conversation},
        {"text": "All of it.\u2028Even this."},
    )
    assert read_pairs(path) == [
        Pair("Why?\n", "Because."),
        Pair("Once upon ", "a time"),
        Pair("system: Be brief.\nuser: 1+1?\nassistant: 2\nuser: 2+2?\nassistant: ", "4"),
        Pair("", "All of it.\u2028Even this."),
    ]


def test_a_chat_template_is_used_where_there_is_one(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["hello there"], 300)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    pairs = read_pairs(write(tmp_path / "chat.jsonl", {"messages": messages}), tokenizer)
    assert pairs == [Pair("<user>hello<assistant>", "there")]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{'question': 1}", "not JSON"),
        ([1, 2], "holds a list"),
        ({"question": "Why?"}, "none of the accepted fields among 'question'"),
        ({"question": "Why?", "answer": 3}, '"answer" is not a string'),
        ({"prompt": "Why?", "completion": "  "}, '"completion" is empty'),
        ({"messages": "hello"}, "not a list of messages"),
        ({"messages": [{"role": "user"}]}, 'needs a "role" and a "content"'),
        ({"messages": [{"role": "user", "content": "hello"}]}, "not an answer of the assistant"),
        ({"text": None}, '"text" is not a string'),
    ],
)
def test_a_bad_row_is_named_with_what_is_accepted(tmp_path: Path, row: Any, complaint: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"text": "fine"}, row)
    with pytest.raises(DataError) as caught:
        read_pairs(path)
    message = str(caught.value)
    assert f"{path}, line 2:" in message
    assert complaint in message
    assert all(shape in message for shape in ("question", "completion", "messages", "text"))


def test_a_file_without_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        read_pairs(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(DataError, match="No such file"):
        read_pairs(tmp_path / "missing.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        read_pairs(tmp_path / "binary.jsonl")


def test_only_the_completion_is_learnt() -> None:
    tokenizer = train_tokenizer(["ask", "tell"] * 9, 300)
    pairs = [Pair("ask", "tell"), Pair("", "tell"), Pair("ask " * 40, "tell")]
    answered, text = encode(pairs, tokenizer, max_length=16)  # the third has no room left for an answer
    end = tokenizer.eos_token_id
    prompt, completion = (tokenizer(word)["input_ids"] for word in ("ask", "tell"))
    assert answered == {
        "input_ids": [*prompt, *completion, end],
        "labels": [*([-100] * len(prompt)), *completion, end],
    }
    assert text == {"input_ids": [*completion, end], "labels": [*completion, end]}


def test_batches_are_padded_to_the_longest(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["some words to learn from"], 300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "rows.jsonl", {"text": "some"}, {"question": "some words", "answer": "to learn from"})
    data = SFTDataModule(str(path), str(tmp_path / "tokenizer"), batch_size=2)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    lengths = batch["attention_mask"].sum(1)
    assert batch["input_ids"].shape == (2, int(lengths.max()))
    assert (batch["input_ids"][batch["attention_mask"] == 0] == tokenizer.pad_token_id).all()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert sorted(lengths.tolist()) == sorted(len(example["input_ids"]) for example in data.examples)


def test_the_standard_library_always_tells_the_same() -> None:
    pairs = docstring_pairs()
    assert len(pairs) > 3000
    assert pairs == docstring_pairs()
    of_this_machine = (" at 0x", sys.prefix, sys.base_prefix)
    assert not [pair for pair in pairs if any(mark in pair["question"] for mark in of_this_machine)]
    join = next(
        pair for pair in pairs if "`posixpath.join(" in pair["question"] or "`os.path.join(" in pair["question"]
    )
    assert join["answer"].startswith("Join two or more pathname components")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--model", "nowhere"], "--model nowhere: no such directory or file"),
        (["--model", str(EXAMPLES)], "nor a checkpoint directory with a config.json"),
        (["--max-steps", "1"], "--max-steps must be at least 2"),
        (["--max-length", "1"], "--max-length must be at least 2"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--hidden-size", "100"], "--hidden-size must be a multiple of 64"),
        (["--vocab-size", "100"], "--vocab-size must be at least 512"),
    ],
)
def test_a_bad_option_is_told_with_its_remedy(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(options)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_bad_file_is_told_in_one_line(tmp_path: Path) -> None:
    result = finetune(tmp_path, "--data", str(write(tmp_path / "bad.jsonl", {"q": "x"})))
    assert result.returncode == 2
    assert "bad.jsonl, line 1: none of the accepted fields" in result.stderr
    assert "Traceback" not in result.stderr


def test_what_only_the_run_can_tell_is_told_in_one_line(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", {"question": "far too long " * 20, "answer": "yes"})
    small = ("--layers", "1", "--hidden-size", "64", "--vocab-size", "512", "--max-steps", "2")
    result = finetune(tmp_path, *small, "--data", str(rows), "--max-length", "4", "--accelerator", "cpu")
    assert result.returncode == 1
    assert "rows.jsonl: no row leaves room for an answer within 4 tokens" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_demo_from_end_to_end(tmp_path: Path) -> None:
    small = ("--layers", "1", "--hidden-size", "128", "--vocab-size", "512", "--max-length", "128", "--batch-size", "4")
    result = finetune(tmp_path, *small, "--max-steps", "4", "--steps-per-turn", "2", "--accelerator", "cpu")
    assert result.returncode == 0, result.stderr
    assert "Loss per step, on the same batches" in result.stdout
    assert "tokens/s         real tokens trained per second" in result.stdout
    numbers = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    measured = {v["name"]: v for v in numbers["variants"] if not v["skipped"]}
    assert numbers["problems"] == [] and list(measured) == ["plain", "+fused head", "+padding-free"]
    assert all(len(v["losses"]) == 4 for v in measured.values())
    assert measured["+padding-free"]["largest_relative_loss_difference"] <= 1e-5
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 10_000
