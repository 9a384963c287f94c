"""Chunks of a few rows, so that small tests cross their borders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_liger.head import linear_cross_entropy


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    before = dict(linear_cross_entropy._MIN_ROWS), dict(linear_cross_entropy._CHUNK_BYTES)
    linear_cross_entropy._MIN_ROWS["cpu"], linear_cross_entropy._CHUNK_BYTES["cpu"] = 4, 16
    yield
    linear_cross_entropy._MIN_ROWS.update(before[0])
    linear_cross_entropy._CHUNK_BYTES.update(before[1])
