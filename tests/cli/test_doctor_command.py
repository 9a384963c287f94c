"""`lightning-liger doctor`: versions, devices, and combinations that are known to go wrong."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_liger.cli import checks, machine, main
from lightning_liger.cli.checks import NOTE, OK, PROBLEM, package_checks
from lightning_liger.cli.doctor import show


def test_this_machine_is_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {check["name"]: check for check in found["checks"]}
    assert found["problems"] == 0
    assert by_name["torch"]["found"] == importlib.metadata.version("torch")
    assert by_name["python"]["found"] == platform.python_version()
    assert "sdpa" in by_name["attention without padding"]["found"]
    assert all(check["remedy"] for check in found["checks"] if check["status"] != OK)


def versions(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> dict[str, checks.Check]:
    real = checks.version
    monkeypatch.setattr(
        checks, "version", lambda name: changed[k] if (k := name.replace("-", "_")) in changed else real(name)
    )
    return {check.name: check for check in package_checks()}


def test_old_and_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = versions(monkeypatch, torch="2.10.1", lightning=None, pytorch_lightning=None, triton="3.4.0", peft="0.9")
    assert found["torch"].status == PROBLEM and found["torch"].remedy == "pip install -U 'torch>=2.11'"
    assert found["lightning"].remedy == "pip install 'lightning>=2.6'"
    assert found["triton"].status == PROBLEM and found["peft"].status == NOTE
    text = show(list(found.values()))
    assert "What to do:" in text and "- torch: pip install -U" in text
    assert main(["doctor"]) == 1
    assert "PROBLEM" in capsys.readouterr().out


def test_attention_packages_that_do_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions(monkeypatch, flash_attn="2.8.3", flash_attn_3="0.0.1")
    assert found["flash-attn"].status == PROBLEM and "attention='varlen' needs no package" in found["flash-attn"].remedy
    assert "holds no kernels" in found["flash-attn-3"].remedy


def test_versions_are_compared_by_their_numbers() -> None:
    assert checks._less("2.9.1", "2.11") and not checks._less("2.11.0+cu130", "2.11")
    assert not checks._less("4.0.0b3", "4") and checks._less("0.8.4", "0.8.5")


def fake_torch(cuda: str | None, count: int = 0, **device: Any) -> Any:
    properties = SimpleNamespace(**{"name": "NVIDIA H200", "total_memory": 141e9, "major": 9, "minor": 0, **device})
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=None),
        backends=SimpleNamespace(),
        cuda=SimpleNamespace(
            device_count=lambda: count,
            get_device_properties=lambda index: properties,
            get_device_name=lambda index: properties.name,
            get_arch_list=lambda: ["sm_80", "sm_90", "compute_90"],
            nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
        ),
    )


def test_a_driver_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_driver", lambda: "550.54")
    assert "this torch 2.13.0 is built for CPUs" in machine._no_device(fake_torch(None), "").found
    check = machine._no_device(fake_torch("13.0"), "the driver is too old")
    assert check.status == PROBLEM and "driver 550.54, torch built for CUDA 13.0: the driver is too old" in check.found
    assert "--gpus all" in check.remedy


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(**device: Any) -> checks.Check:
        return list(machine._devices(fake_torch("13.0", 1, **device)))[-1]

    assert last().status == OK and last(major=8, minor=6).status == OK and last(major=12).status == OK  # by its PTX
    assert last(major=7, minor=5).status == PROBLEM
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    two = list(machine._several(fake_torch("13.0", 2, name="NVIDIA GeForce RTX 4090")))
    assert [c.status for c in two] == [OK, NOTE] and "NCCL_P2P_DISABLE=1" in two[1].remedy


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "cute")
    found = {check.name: check.status for check in machine._environment(cuda=True)}
    assert found == {"TRITON_INTERPRET": PROBLEM, "LIGER_KERNEL_IMPL": NOTE}
    monkeypatch.setenv("CC", "/nowhere/gcc")
    if platform.system() == "Linux":
        assert [c.status for c in machine._compiler()] == [PROBLEM]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64e6))
    (shared,) = machine._shared_memory()
    assert shared.status == NOTE and "--shm-size" in shared.remedy
