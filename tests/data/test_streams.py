"""Streams: batches within the budget, nothing lost, and ranks that end together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
from helpers import QUIET, Document, documents
from test_training import BUDGET, Module, by_epoch, numbered
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_liger import LigerCallback
from lightning_liger.data.stream import PackedStream


class Stream(IterableDataset[Any]):
    def __init__(self, count: int = 60) -> None:
        self.rows = documents(count, seed=5)

    def __iter__(self) -> Iterator[tuple[int, Document]]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from list(enumerate(self.rows))[first::every]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_packed_and_nothing_is_lost(workers: int) -> None:
    module = Module()
    callback = LigerCallback(verbose=False, max_tokens_per_batch=BUDGET)
    data: Any = DataLoader(Stream(), batch_size=4, collate_fn=numbered, num_workers=workers)
    L.Trainer(callbacks=[callback], **{**QUIET, "max_steps": -1, "max_epochs": 2}).fit(module, data)
    assert [sorted(by_epoch(module, e)) for e in (0, 1)] == [list(range(60))] * 2
    assert max(tokens for _, _, tokens in module.seen) <= BUDGET
    assert sum(tokens for _, _, tokens in module.seen) / (len(module.seen) * BUDGET) > 0.85
    assert callback.report.to_dict()["token_batches"]["streams"] == 1


def test_the_sample_that_waited_longest_comes_first() -> None:
    made = list(PackedStream(Stream(), numbered, BUDGET, None, "error", look_ahead=16))
    position = {int(i): at for at, batch in enumerate(made) for i in batch["number"]}
    assert len(position) == 60
    assert all(position[i] * 1 <= i for i in range(60)), "no sample waits for more batches than came before it"


def test_a_sample_over_the_budget() -> None:
    with pytest.raises(ValueError, match=r"more than max_tokens_per_batch=20.*overlong='truncate'"):
        list(PackedStream(Stream(), numbered, 20, None, "error"))
    skipped = list(PackedStream(Stream(), numbered, 20, None, "skip"))
    assert max(int(b["attention_mask"].sum()) for b in skipped) == 20
