"""``lightning-liger bench --suite long``: the longest document that trains."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lightning_liger.cli.errors import CommandError
from lightning_liger.cli.outcome import conclude

SIZES = ("0.5b", "7b", "tiny")
# what belongs to comparisons of one batch, with the values that mean "not given"
_OTHERS = {"peers": "none", "max_tokens": None, "time_limit": None}


def run(given: argparse.Namespace) -> int:
    """Measure and show; the exit code."""
    from lightning_liger.bench.long.attempts import Subject
    from lightning_liger.bench.long.measuring import as_dict, measure_long
    from lightning_liger.bench.long.showing import show
    from lightning_liger.printing import printable

    sizes, features = _sizes(given.only), _features(given.features)
    for name, default in _OTHERS.items():
        if getattr(given, name) != default:
            option = f"--{name.replace('_', '-')}"
            raise CommandError(f"{option} {getattr(given, name)}: is not about --suite long; see --step-limit.")
    results = []
    for size in sizes:
        subject = Subject(size, round((given.memory or 0) * 1e9), given.seed, given.accelerator or "auto")
        result = measure_long(
            subject,
            features=features,
            step_seconds=given.step_limit,
            most=given.longest,
            tell=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
        )
        results.append(result)
        if not given.json:
            print("\n" + printable(show(result)) + "\n", flush=True)
        if given.output:
            _write(results, Path(given.output))
    traces = (a.trace for r in results for _, found in r.found for a in found.attempts if a.trace)
    return conclude(results, traces, as_dict if given.json else None)


def _sizes(only: list[str] | None) -> list[str]:
    import torch

    for name in only or []:
        if name not in SIZES:
            raise CommandError(f"--only {name}: --suite long has {', '.join(SIZES)}.")
    return only or (["0.5b", "7b"] if torch.cuda.is_available() else ["tiny"])


def _features(text: str | None) -> tuple[str, ...]:
    from lightning_liger.bench.long.rungs import KEYS

    chosen = KEYS if text is None else tuple(part.strip() for part in text.split(",") if part.strip())
    for name in chosen:
        if name not in KEYS:
            raise CommandError(f"--features {text}: no feature {name!r} of --suite long; there are {', '.join(KEYS)}.")
    return chosen


def _write(results: list[Any], folder: Path) -> None:
    from lightning_liger.bench.long.measuring import as_dict
    from lightning_liger.bench.long.showing import save_picture, show

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "long.json").write_text(json.dumps([as_dict(r) for r in results], indent=2) + "\n", encoding="utf-8")
    (folder / "long.txt").write_text("\n\n\n".join(map(show, results)) + "\n", encoding="utf-8")
    try:
        save_picture(results, folder / "long.png")
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
