"""What the pages tell a reader to run, runs: Python as it stands, YAML through the command line, commands by their options.

How to write a page so that it passes is in CONTRIBUTING.md.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
import yaml
from code_in_docs import ROOT, Block, blocks, compiled, names, pages, stand_ins

from lightning_liger.cli import COMMANDS, main

BLOCKS = [block for page in pages() for block in blocks(page)]
# no output of a command, no drawing
LANGUAGES = {"python", "yaml", "console", "bash"}


def of(*languages: str) -> Any:
    found = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", found, ids=[block.place for block in found])


@pytest.fixture(autouse=True)
def small_and_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainers of one CPU and one step, whatever the page asks for, in a directory of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", "fit"])
    init = L.Trainer.__init__
    small = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "max_steps": 1, "logger": False}
    small |= dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)

    @functools.wraps(init)
    def small_init(self: Any, **options: Any) -> None:
        own = {"max_epochs", "callbacks", "strategy", "precision"}
        init(self, **{**small, **{k: v for k, v in options.items() if k in own or k not in small}})

    monkeypatch.setattr(L.Trainer, "__init__", small_init)
    yield
    if dist.is_initialized():  # a strategy leaves its group to the end of the process
        dist.destroy_process_group()


def test_the_pages_are_found_and_their_blocks_say_what_they_are() -> None:
    assert {"README.md", "strategy.md", "yaml.md"} <= {block.page.name for block in BLOCKS}
    assert not [block.place for block in BLOCKS if block.language not in {*LANGUAGES, "text", ""}]
    assert not [block.place for block in BLOCKS if block.language == "py"]


@of("python")
def test_python(block: Block) -> None:
    code = compiled(block)
    if block.not_run:
        pytest.skip(block.not_run)
    # what the blocks above on the same page have made is there, as it is for the reader
    before = [other for other in BLOCKS if other.page == block.page and other.line < block.line]
    given, space = stand_ins(), {"__name__": "__main__"}
    used = names(block)
    for other in before:
        if other.language == "python" and not other.not_run and used & _made_by(other):
            _run(other, compiled(other), given, space)
    _run(block, code, given, space)


def _run(block: Block, code: Any, given: dict[str, Any], space: dict[str, Any]) -> None:
    space.update({name: given[name]() for name in names(block) if name in given and name not in space})
    exec(code, space)


def _made_by(block: Block) -> set[str]:
    return set(re.findall(r"^(?:class |def )?(\w+)(?:\(.*\):| = )", block.text, re.MULTILINE))


@of("yaml")
def test_yaml(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    read = yaml.safe_load(block.text)
    if block.not_run:
        pytest.skip(block.not_run)
    if "trainer" not in read:
        return
    read.setdefault("model", {"class_path": "only_lightning.TinyModule"})
    Path("page.yaml").write_text(yaml.safe_dump(read), encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", "page.yaml", "--print_config"])
    assert stopped.value.code == 0, capsys.readouterr().err[-1500:]


@of("console", "bash")
def test_commands(block: Block) -> None:
    text = block.text.replace("\\\n", " ")
    lines = [line[2:] for line in text.splitlines() if line.startswith("$ ")] if block.language == "console" else None
    commands = [line for line in (text.splitlines() if lines is None else lines) if line.strip()]
    assert commands, "a console block shows commands behind `$ `"
    if block.not_run:
        pytest.skip(block.not_run)
    here = ROOT
    for command in commands:
        words = shlex.split(command, comments=True)
        if words[:1] == ["cd"]:
            here /= words[1]
            assert here.is_dir(), command
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words:
            _check(words, command, here)


def _check(words: list[str], command: str, here: Path) -> None:
    """That what a command runs is there, and knows the options that it is given."""
    program, *rest = words
    if program == "torchrun":
        rest = rest[next((i for i, word in enumerate(rest) if word.endswith(".py") or word in ("-m", "--module")), 0) :]
        program = "python"
    if program == "make":
        targets = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(f"\n{word}:" in targets for word in rest if "=" not in word), command
    elif program == "lightning-liger":
        assert rest[0] in COMMANDS or rest[0].startswith("-"), command
        if rest[0] in COMMANDS and not COMMANDS[rest[0]].named:
            _check_options(_source(COMMANDS[rest[0]].module), rest[1:], command)
    elif program == "python":
        if rest[0] in ("-m", "--module"):
            _check_options(_source(rest[1]), rest[2:], command)
        else:
            assert (here / rest[0]).is_file(), command
            _check_options(_with_what_it_imports(here / rest[0]), rest[1:], command)
    else:
        assert program in ("pip", "git", "cd", "export", "pytest"), (
            f"{command}: is {program!r} a program of the reader's?"
        )


def _with_what_it_imports(script: Path) -> str:
    source = script.read_text(encoding="utf-8")
    beside = [script.parent / f"{name}.py" for name in re.findall(r"^from (\w+) import", source, re.MULTILINE)]
    return source + "".join(path.read_text(encoding="utf-8") for path in beside if path.is_file())


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"no module {module}"
    return Path(spec.origin).read_text(encoding="utf-8")


def _check_options(source: str, words: list[str], command: str) -> None:
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in ("--help", "--version", "--"):
            assert f'"{option}"' in source, f"{command}: {option} is not an option of it"
