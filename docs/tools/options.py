"""Writes docs/options.md from the docstrings and signatures of what takes options.

python docs/tools/options.py [--write docs/options.md]
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_liger import LigerFSDPStrategy, Settings
from lightning_liger.pages import show_or_write

_SECTIONS: list[tuple[str, str, Any]] = [
    (
        "Callback",
        "`LigerCallback(...)` takes these as keywords, `lightning_liger.accelerate(model, Settings(...))` as a dataclass.",
        Settings,
    ),
    ("Strategy", "`LigerFSDPStrategy(...)`; each has a place under `init_args` in YAML as well.", LigerFSDPStrategy),
]


def options(owner: Any) -> Iterator[tuple[str, str, str]]:
    """``(name, default, meaning)`` of each argument that the docstring of ``owner`` describes.

    Raises:
        ValueError: an argument without a description, or a description without an argument.
    """
    described = _arguments(inspect.getdoc(owner) or "")
    parameters = inspect.signature(owner).parameters
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {name for name, p in parameters.items() if p.kind not in kinds}
    if named != set(described):
        raise ValueError(f"{owner.__name__}: signature and docstring differ about {sorted(named ^ set(described))}")
    for name, meaning in described.items():
        yield name, repr(parameters[name].default), meaning


def _arguments(doc: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    inside = False
    for line in doc.splitlines():
        if re.fullmatch(r"[A-Z]\w+:", line):
            inside = line == "Args:"
        elif inside and (start := re.fullmatch(r"    (\w+): (.*)", line)):
            name = start[1]
            found[name] = start[2]
        elif inside and line.startswith("        "):
            found[name] += " " + line.strip()
    return {k: _markdown(v) for k, v in found.items()}


def _markdown(text: str) -> str:
    """Of reStructuredText's literals and roles."""
    text = re.sub(r":\w+:`[~]?([\w.]+)`", r"`\1`", text)
    text = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text.replace("``", "`"))
    return text[:1].upper() + text[1:]


def markdown() -> str:
    """A heading for each option, so that each has an address of its own."""
    lines: list[str] = []
    for title, introduction, owner in _SECTIONS:
        lines += [f"## {title}", "", introduction, ""]
        for name, default, meaning in options(owner):
            lines += [f"### {name}", "", f"Default: `{default}`", "", meaning, ""]
    return "\n".join(lines).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to write into, between its marks")
    return show_or_write(markdown(), parser.parse_args().write)


if __name__ == "__main__":
    sys.exit(main())
