"""The two commands must install the same set everywhere, without asking anything of the machine."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).parent.parent


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split(";")[0].strip() for line in lines if line and not line.startswith("#")]
    return dict(pin.split("==") for pin in pins)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_pin_is_a_public_version() -> None:
    pins = pinned()
    assert pins["torch"] == "2.13.0"
    assert not [f"{name}=={version}" for name, version in pins.items() if "+" in version]


def test_everything_the_commands_install_is_pinned() -> None:
    not_for_the_commands = re.compile(r"extra == ['\"](deepspeed|fa4|nvml)['\"]")
    names = {
        canonical(re.split(r"[\[<>=!~; ]", requirement)[0])
        for requirement in requires("lightning-liger") or []
        if not not_for_the_commands.search(requirement)
    }
    assert names - {"lightning-liger"} <= pinned().keys()


def test_types_are_shipped() -> None:
    assert (ROOT / "lightning_liger" / "py.typed").exists()


def test_one_version_everywhere() -> None:
    import lightning_liger

    version = lightning_liger.__version__
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
