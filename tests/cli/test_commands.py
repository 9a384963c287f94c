"""The table of subcommands, its errors, and objects named on a command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_liger
from lightning_liger.cli import COMMANDS, main
from lightning_liger.cli.errors import CommandError
from lightning_liger.cli.targets import is_named, load


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and command.help in shown for name, command in COMMANDS.items())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning-liger {lightning_liger.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    first = capsys.readouterr().out.splitlines()[0]  # LightningCLI writes "[options]" before the subcommand
    assert first.replace("[options] ", "").startswith(f"usage: lightning-liger {name}")


def test_a_command_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["exprot", "a"]) == 2
    error = capsys.readouterr().err
    assert "no subcommand 'exprot'. Did you mean 'export'?" in error


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "nowhere.ckpt", "out"]) == 2
    assert capsys.readouterr().err == (
        "lightning-liger export: error: CHECKPOINT nowhere.ckpt: there is no such file or directory.\n"
    )


def test_as_a_module_of_python() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "lightning_liger", "--help"], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: lightning-liger COMMAND")


def test_objects_are_found_in_files_and_in_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "named_target.py").write_text("from beside import VALUE\nclass Outer:\n    inner = VALUE\n")
    assert load(f"{tmp_path}/named_target.py:Outer.inner", "TARGET") == 7
    assert load("pathlib:Path", "TARGET") is Path
    monkeypatch.chdir(tmp_path)
    assert load("beside:VALUE", "TARGET") == 7
    assert not is_named("meta-llama/Llama-3") and not is_named("C:\\model") and is_named("a.py:b")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("llama", "expected path/to/file.py:name or package.module:name"),
        ("missing.py:Module", "there is no file"),
        ("pathlib:Pth", "pathlib has no 'Pth'. Did you mean 'Path'?"),
        ("not_installed_at_all:Module", "no module 'not_installed_at_all' is installed"),
    ],
)
def test_what_is_not_found_is_named_with_the_remedy(text: str, complaint: str) -> None:
    with pytest.raises(CommandError, match=r"TARGET ") as raised:
        load(text, "TARGET")
    assert complaint in str(raised.value)


def test_a_file_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken_target.py").write_text("1 / 0\n")
    with pytest.raises(CommandError, match=r"running broken_target.py failed: ZeroDivisionError: division by zero"):
        load(f"{tmp_path / 'broken_target.py'}:Module", "TARGET")
