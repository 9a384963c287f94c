"""Configuration files: both forms of both entries, what they print, what they refuse, in both Lightning trees."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import only_lightning
import only_pytorch_lightning
import pytest
import yaml

from lightning_liger import LigerCallback, Settings, cli_main
from lightning_liger.cli import main
from lightning_liger.strategy import strategy_class

TESTS = Path(__file__).parent.parent
MODULES = {"lightning.pytorch": only_lightning, "pytorch_lightning": only_pytorch_lightning}
OWN_STRATEGY = {"lightning.pytorch": "LigerFSDPStrategy", "pytorch_lightning": "LigerFSDPStrategyPL"}
both_trees = pytest.mark.parametrize("tree", MODULES)


def trainer(**options: Any) -> dict[str, Any]:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return {"accelerator": "cpu", "devices": 1, "max_steps": 2, **quiet, **options}


def string_form() -> dict[str, Any]:
    callback = {"class_path": "lightning_liger.LigerCallback", "init_args": {"max_tokens_per_batch": 64}}
    return trainer(strategy="liger_fsdp", callbacks=[callback])


def class_form(tree: str) -> dict[str, Any]:
    strategy = {"class_path": f"lightning_liger.{OWN_STRATEGY[tree]}", "init_args": {"bf16": False, "prefetch": 1}}
    return {**string_form(), "strategy": strategy}


def write(path: Path, tree: str, options: dict[str, Any]) -> str:
    name = MODULES[tree].__name__
    classes = {"model": {"class_path": f"{name}.TinyModule"}, "data": {"class_path": f"{name}.TinyData"}}
    path.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": options, **classes}), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])


def stopped(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["fit", *args])
    return int(caught.value.code or 0)


@both_trees
def test_a_script_of_a_plain_lightning_cli(tree: str, tmp_path: Path) -> None:
    script = f"from {tree}.cli import LightningCLI\nimport sys\nassert 'lightning_liger' not in sys.modules\n"
    for number, options in enumerate((string_form(), class_form(tree))):
        file = write(tmp_path / f"{number}.yaml", tree, options)
        script += f"cli = LightningCLI(args=['fit', '--config', {file!r}], save_config_callback=None)\n"
        script += "print(type(cli.trainer.strategy).__name__, cli.trainer.global_step)\n"
    env = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "PATH": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count(f"{OWN_STRATEGY[tree]} 2") == 2, run.stdout
    assert run.stdout.count("Token-budget batches") == 2, run.stdout


@both_trees
@pytest.mark.parametrize("form", ["string", "class"])
def test_what_is_printed_loads_again(tree: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "first.yaml", tree, string_form() if form == "string" else class_form(tree))
    assert stopped("--config", file, "--print_config") == 0
    printed = capsys.readouterr().out
    (tmp_path / "second.yaml").write_text(printed, encoding="utf-8")
    assert stopped("--config", "second.yaml", "--print_config") == 0
    assert capsys.readouterr().out == printed
    (entry,) = yaml.safe_load(printed)["trainer"]["callbacks"]
    assert set(entry["init_args"]) == {field.name for field in fields(Settings)}
    assert entry["init_args"]["max_tokens_per_batch"] == 64
    cli = cli_main(args=["fit", "--config", "second.yaml"])
    assert type(cli.trainer) is sys.modules[tree].Trainer
    assert cli.trainer.global_step == 2
    assert len(cli.model.losses) == 2
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    assert saved["trainer"] == yaml.safe_load(printed)["trainer"]


@both_trees
def test_a_strategy_by_name_and_nothing_else_of_ours(tree: str, tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", tree, trainer(strategy="liger_fsdp"))
    assert main(["fit", "--config", file]) == 0
    Path("config.yaml").unlink()  # which Lightning does not overwrite
    cli = cli_main(args=["validate", "--config", file])
    assert type(cli.trainer.strategy) is strategy_class(tree)
    assert sum(isinstance(callback, LigerCallback) for callback in cli.trainer.callbacks) == 1


@both_trees
def test_a_file_that_knows_nothing_of_us_is_accelerated(tree: str, tmp_path: Path) -> None:
    cli = cli_main(args=["fit", "--config", write(tmp_path / "c.yaml", tree, trainer())])
    (callback,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, LigerCallback)]
    assert callback.report.padding.packed_calls == 2
    assert callback.report.head.fused_calls == 2


@both_trees
def test_short_names_and_options_on_the_command_line(tree: str, tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", tree, trainer())
    options = ["--trainer.callbacks+=LigerCallback", "--trainer.callbacks.padding_free=false"]
    options += [f"--trainer.strategy={OWN_STRATEGY[tree]}", "--trainer.strategy.bf16=false"]
    cli = cli_main(args=["fit", "--config", file, *options])
    (callback,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, LigerCallback)]
    assert not callback.settings.padding_free
    assert "compute fp32" in callback.report.render()


@both_trees
def test_classes_given_by_a_script(tree: str, tmp_path: Path) -> None:
    module = MODULES[tree]
    options = {f"trainer.{name}": value for name, value in trainer().items()}
    args = ["fit", "--model.lr=0.01", *(f"--{name}={value}".lower() for name, value in options.items())]
    cli = cli_main(module.TinyModule, module.TinyData, args=args, save_config_callback=None)
    assert type(cli.trainer) is sys.modules[tree].Trainer
    assert cli.model.hparams["lr"] == 0.01


@both_trees
def test_help_says_what_the_docstrings_say(tree: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = MODULES[tree].__name__
    assert stopped(f"--model={name}.TinyModule", "--trainer.callbacks.help=LigerCallback") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in fields(Settings):
        assert f"--trainer.callbacks.{field.name} " in shown
    assert "Remove padding at the model's backbone." in shown
    assert "--trainer.callbacks.attention {auto,fa4,fa3,fa2,varlen,flex,sdpa}" in shown
    assert stopped(f"--model={name}.TinyModule", f"--trainer.strategy.help={OWN_STRATEGY[tree]}") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--trainer.strategy.activation_checkpointing {none,selective,full}" in shown
    assert "number of whole copies of the model" in shown


@both_trees
@pytest.mark.parametrize(
    ("entry", "place", "reason"),
    [
        ({"callback": {"attention": "fa9"}}, 'Parser key "trainer.callbacks"', 'Parser key "attention"'),
        ({"callback": {"atention": "fa2"}}, 'Parser key "trainer.callbacks"', "'atention' is not accepted"),
        ({"callback": {"overlong": "skip"}}, "trainer.callbacks[0].init_args.overlong", "max_tokens_per_batch"),
        ({"callback": {"head": ""}}, "trainer.callbacks[0].init_args.head", "expected the path of an nn.Linear"),
        ({"strategy": {"offload": "maybe"}}, 'Parser key "trainer.strategy"', 'Parser key "offload"'),
        ({"strategy": {"prefetch": -1}}, "trainer.strategy.init_args.prefetch", "expected"),
        ({"precision": "16-mixed"}, "trainer.precision", "16-mixed"),
    ],
)
def test_an_error_names_its_place(
    tree: str, entry: dict[str, Any], place: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = trainer(strategy={"class_path": f"lightning_liger.{OWN_STRATEGY[tree]}"})
    options["strategy"]["init_args"] = entry.get("strategy", {})
    options["callbacks"] = [{"class_path": "lightning_liger.LigerCallback", "init_args": entry.get("callback", {})}]
    options["precision"] = entry.get("precision")
    assert stopped("--config", write(tmp_path / "c.yaml", tree, options)) == 2
    shown = capsys.readouterr().err
    assert place in shown
    assert reason in shown.split(place)[1]
    assert "Traceback" not in shown
