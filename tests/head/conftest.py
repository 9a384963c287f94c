"""Chunks of a few rows, so that small tests cross their borders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_liger.head import chunks


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    before = dict(chunks._MIN_ROWS), dict(chunks._CHUNK_BYTES)
    chunks._MIN_ROWS["cpu"], chunks._CHUNK_BYTES["cpu"] = 4, 16
    yield
    chunks._MIN_ROWS.update(before[0])
    chunks._CHUNK_BYTES.update(before[1])
