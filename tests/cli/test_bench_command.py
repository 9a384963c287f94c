"""`lightning-liger bench`: its targets, its errors, and one run from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lightning_liger.bench.job import NoJob
from lightning_liger.bench.sources import Config
from lightning_liger.cli import main

JOBS = Path(__file__).parent.parent / "attribution" / "jobs.py"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "give either TARGET (config.yaml or script.py:build) or --suite"),
        (["a.py:b", "--suite", "gsm8k"], "give either TARGET"),
        (["missing.yaml"], "TARGET missing.yaml: there is no such file"),
        (["some/model"], "TARGET some/model: expected config.yaml, script.py:build or package.module:build"),
        ([f"{JOBS}:VOCAB"], "expected a function that returns a LightningModule"),
        ([f"{JOBS}:ordinery"], "Did you mean 'ordinary'?"),
        ([f"{JOBS}:ordinary", "--features", "padding,magic"], "--features padding,magic: no feature 'magic'"),
        ([f"{JOBS}:ordinary", "--steps", "0"], "--steps 0: must be at least 1"),
        ([f"{JOBS}:ordinary", "--max-tokens", "-4"], "--max-tokens -4: expected a positive number of tokens"),
        ([f"{JOBS}:ordinary", "--peers", "all"], "--peers all: peers train the data and model of a --suite"),
        (["--suite", "gsm8k", "--peers", "trl,magic"], "--peers trl,magic: no peer 'magic'; there are trainer, trl"),
        (["--suite", "gsm8k", "--only", "900b"], "--only 900b: --suite gsm8k has tiny"),
    ],
)
def test_a_wrong_command_line_is_told_with_its_remedy(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    assert complaint in capsys.readouterr().err


def test_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--features", "padding", "--steps", "1", "--warmup", "1", "--rounds", "1", "--json", "--order", "rounds"]
    assert main(["bench", f"{JOBS}:ordinary", *options, "--output", str(tmp_path)]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown == json.loads((tmp_path / "bench.json").read_text())
    (result,) = shown
    assert result["name"] == "jobs" and [v["name"] for v in result["variants"]] == ["plain", "+padding-free"]
    assert result["variants"][1]["largest_relative_loss_difference"] <= 1e-5
    assert "tokens/s" in (tmp_path / "bench.txt").read_text()
    assert (tmp_path / "bench.png").stat().st_size > 10_000


CONFIG = """
seed_everything: 3
trainer:
  precision: 32-true
  max_epochs: 4
  logger: true
  callbacks:
    - class_path: lightning_liger.LigerCallback
      init_args: {attention: sdpa, max_tokens_per_batch: 64}
model:
  class_path: configured.Configured
  init_args: {width: 7}
ckpt_path: null
"""


def test_a_configuration_of_lightnings_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configured.py").write_text(
        "import lightning as L\n"
        "class Configured(L.LightningModule):\n"
        "    def __init__(self, width: int):\n"
        "        super().__init__()\n"
        "        self.width = width\n"
        "    def training_step(self, batch, batch_idx): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    job = Config(str(path))()
    assert job.module.width == 7 and job.data is None
    assert job.trainer == {"precision": "32-true"}
    assert job.options == {"attention": "sdpa", "max_tokens_per_batch": 64}
    path.write_text("fit:\n" + "".join(f"  {line}\n" for line in CONFIG.splitlines()))
    assert Config(str(path))().module.width == 7
    path.write_text("model:\n  width: 7\n")
    with pytest.raises(NoJob, match="`model:` names no class"):
        Config(str(path))()
    path.write_text("model:\n  class_path: nowhere.Module\n")
    with pytest.raises(NoJob, match=r"'nowhere\.Module' cannot be imported"):
        Config(str(path))()
    sys.modules.pop("configured", None)
