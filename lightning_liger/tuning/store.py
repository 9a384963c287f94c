"""Decisions of earlier runs, kept as small files in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_liger.tuning.decision import Decision


def directory() -> Path:
    """``$XDG_CACHE_HOME/lightning-liger/tuning``, or the same under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "lightning-liger" / "tuning"


def _file(key: Mapping[str, Any]) -> Path:
    text = json.dumps(key, sort_keys=True, default=str)
    return directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def load(key: Mapping[str, Any]) -> Decision | None:
    """What was decided for ``key``; None if nothing was, or if the file cannot be read."""
    try:
        found = json.loads(_file(key).read_text("utf-8"))
        return Decision.from_dict(found["decision"]) if found["key"] == _plain(key) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def save(key: Mapping[str, Any], decision: Decision) -> None:
    """Keep it. A directory that cannot be written to costs the next run its timing, and nothing else."""
    path = _file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # two trainings may end their timing at the same moment
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump({"key": _plain(key), "decision": decision.to_dict()}, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        pass


def _plain(key: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(key, sort_keys=True, default=str))
