"""Streams: batches within the budget, nothing lost, and ranks that end together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers import QUIET, Document, documents
from lightning.pytorch.callbacks import ModelCheckpoint
from test_training import BUDGET, Module, by_epoch, numbered
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_liger.data.stream as liger_stream
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


class Counted(Stream):
    """Knows where it is."""

    def __init__(self, count: int = 60) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[tuple[int, Document]]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = list(enumerate(self.rows))[first::every]
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(
    ("stream", "workers", "limit"), [(Stream, 0, 1.0), (Counted, 0, 1.0), (Counted, 2, 1.0), (Stream, 0, 6)]
)
def test_a_stream_is_resumed_by_the_loader_that_can(
    stream: Any, workers: int, limit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(path: Any = None) -> Module:
        module = Module()
        monkeypatch.setattr(liger_stream, "_PLACES_EVERY", 8)
        data = StatefulDataLoader(stream(), batch_size=4, collate_fn=numbered, num_workers=workers)
        saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1) if path is None else None
        callbacks = [LigerCallback(verbose=False, max_tokens_per_batch=BUDGET), *([saver] if saver else [])]
        options = {**QUIET, "max_steps": -1, "max_epochs": 2, "limit_train_batches": limit}
        options["enable_checkpointing"] = saver is not None
        L.Trainer(callbacks=callbacks, **options).fit(module, data, ckpt_path=path)
        return module

    whole = run()
    assert limit == 6 or [sorted(by_epoch(whole, e)) for e in (0, 1)] == [list(range(60))] * 2
    steps = len(whole.seen) // 2
    for step in (3, steps, steps + 2):
        assert run(tmp_path / f"step={step}.ckpt").seen == whole.seen[step:], step
