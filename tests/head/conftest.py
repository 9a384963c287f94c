"""Chunks of a few rows, so that small tests cross their borders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_liger.head import chunks


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    tables = chunks._MIN_ROWS, chunks._CHUNK_BYTES, chunks._TOGETHER_BYTES
    before = [dict(table) for table in tables]
    chunks._MIN_ROWS["cpu"], chunks._CHUNK_BYTES["cpu"], chunks._TOGETHER_BYTES["cpu"] = 4, 16, 12 * 31 * 8
    yield
    for table, values in zip(tables, before, strict=True):
        table.update(values)
