from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def lengths_are_kept_elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory: Path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LIGHTNING_LIGER_CACHE", str(directory))
