"""Built-in comparisons: a suite is a list of names and build functions."""

from __future__ import annotations

from collections.abc import Callable

from lightning_liger.bench.gsm8k import gsm8k
from lightning_liger.bench.job import Build

Suite = Callable[[], list[tuple[str, Build]]]

SUITES: dict[str, Suite] = {"gsm8k": gsm8k}
