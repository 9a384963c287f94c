"""Sharded modules resume exactly, on any number of ranks, from a file or a directory, with or without this package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_liger.parallel import files, sharded, single
from lightning_liger.parallel.checkpoint import module_state, save

HERE = Path(__file__).parent


ACCELERATORS = pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])


def launch(worker: str, accelerator: str, *arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    if accelerator == "gpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_ACCELERATOR": accelerator}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    return subprocess.run(
        [*command, str(HERE / worker), *arguments], env=environment, capture_output=True, text=True, timeout=240
    )


def ran(done: subprocess.CompletedProcess[str]) -> int:
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout.count("ok ")


# Three launches of some 15 seconds each: a number of ranks cannot change inside of one.
@pytest.mark.timeout(400)
@ACCELERATORS
def test_resuming_on_two_one_and_two(accelerator: str, tmp_path: Path) -> None:
    assert ran(launch("checkpoint_worker.py", accelerator, "two", str(tmp_path))) == 16
    assert ran(launch("checkpoint_worker.py", accelerator, "one", str(tmp_path), processes=1)) == 6
    assert ran(launch("checkpoint_worker.py", accelerator, "two_again", str(tmp_path))) == 6


# Some 70 short trainings of two processes share one launch.
@pytest.mark.timeout(400)
@ACCELERATORS
def test_what_is_around_checkpoints(accelerator: str, tmp_path: Path) -> None:
    assert ran(launch("checkpoint_cases.py", accelerator, "all", str(tmp_path))) == 63


def read(path: Path) -> dict[str, Any]:
    return sharded.read(path, {}, weights_only=True) if path.is_dir() else single.read(path, weights_only=True)


# Starting two processes is most of the time: what a kernel does with shards is asked of the same cases, interpreted.
def test_the_optimizers_kernel_over_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cases = ("bf16_state_over_shards", "bf16_state_of_copies_is_rounded_alike")
    assert ran(launch("checkpoint_cases.py", "cpu", "all", str(tmp_path), *cases)) == 2


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_killed_in_the_middle_of_a_save(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    # they meet at a file: a port that is free now may be taken when they listen
    meeting = tmp_path.with_name(f"{tmp_path.name}-meeting")
    command = [sys.executable, str(HERE / "crash_worker.py"), kind, str(path), meeting.as_uri()]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(command, env={**os.environ, **paths, "RANK": str(r)}) for r in range(2)]
    assert ranks[0].wait(120) == -signal.SIGKILL
    assert ranks[1].wait(120) != 0  # it notices
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == [".it.ckpt.partial", "it.ckpt"], left
    found = read(path)
    assert found["carried"] == 1.0
    assert torch.equal(found["state_dict"]["weight"], torch.ones(300, 300))
    module = torch.nn.Linear(300, 300)
    save({"state_dict": module_state(module), "carried": 3.0}, path, kind, module)
    assert [p.name for p in tmp_path.iterdir()] == ["it.ckpt"]
    again = read(path)
    assert again["carried"] == 3.0
    assert torch.equal(again["state_dict"]["weight"], module.weight.detach())


def test_a_directory_that_was_being_replaced_is_found(tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    module = torch.nn.Linear(2, 2)
    save({"state_dict": module_state(module)}, path, "sharded", module)
    os.rename(path, tmp_path / ".it.ckpt.previous")  # where a crash between the two renames leaves it
    assert torch.equal(read(files.existing(path))["state_dict"]["weight"], module.weight.detach())


def test_kinds_replace_each_other(tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    module = torch.nn.Linear(2, 2)
    kinds: list[Any] = ["full", "sharded", "sharded", "full"]
    for i, kind in enumerate(kinds):
        save({"state_dict": module_state(module), "i": i}, path, kind, module)
        assert path.is_dir() == (kind == "sharded")
        assert read(path)["i"] == i
        assert [p.name for p in tmp_path.iterdir()] == ["it.ckpt"]


def test_half_written_ones_of_other_names_go_once_nobody_writes_them(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.ckpt.partial", tmp_path / ".b.ckpt.partial"
    for folder in (old, new):
        folder.mkdir()
        (folder / "part").write_text("x")
    past = time.time() - 7200
    for entry in (old / "part", old):
        os.utime(entry, (past, past))
    files.start(tmp_path / "c.ckpt")
    assert not old.exists() and new.exists()
