"""The documentation's site builds without a warning, and what commands write into its pages is what they would write now."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"documentation_{name}", ROOT / "docs" / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install 'lightning-liger[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """``--strict``: a link, an anchor or a page of the navigation that is not there is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    for page in ROOT.glob("docs/*.md"):
        built = tmp_path / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        assert built.is_file(), page.name
        assert f'href="{"." if page.stem == "index" else page.stem + "/"}"' in (tmp_path / "index.html").read_text(), (
            f"{page.name} is not in the navigation of mkdocs.yml"
        )


def test_the_page_of_options_is_written_from_the_docstrings() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert _tool("options").markdown() in page, "run: python docs/tools/options.py --write docs/options.md"


def test_the_pictures_are_those_of_the_script() -> None:
    tool = _tool("drawings")
    for theme in tool.THEMES:
        for name, svg in tool.draw(theme).items():
            drawn = ROOT / "docs" / "images" / f"{name}-{theme.name}.svg"
            assert drawn.read_text(encoding="utf-8") == svg, "run: python docs/tools/drawings.py"


def test_the_numbers_of_the_pictures_are_in_the_tables() -> None:
    tables = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    tool = _tool("drawings")
    for numbers in (tool.MEMORY, tool.TIMES):
        for _, plain, ours in numbers:
            assert (plain is None or f" {plain} |" in tables) and f" {ours} |" in tables
