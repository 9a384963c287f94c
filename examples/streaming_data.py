"""A corpus that is read as it streams by: tokenised on the way, shuffled in a buffer, shared by ranks and workers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sft_data import pad, to_pair
from sft_module import Batch, pretrained_arguments

Row = dict[str, list[int]]


class Documents(IterableDataset[Row]):
    """Every document once per epoch, on one of the ranks and one of its workers.

    Args:
        path: JSON lines; of rows that are no ``{"text": ...}``, question and answer are one document.
        max_length: longer documents are cut into pieces of this many tokens.
        buffer: documents that wait, of which a random one is next.
    """

    def __init__(
        self, path: str, tokenizer: PreTrainedTokenizerBase, max_length: int, buffer: int = 256, seed: int = 0
    ) -> None:
        self.path, self.tokenizer, self.max_length = path, tokenizer, max_length
        self.buffer, self.seed, self.epoch = buffer, seed, 0

    def _mine(self) -> Iterator[str]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        with open(self.path, encoding="utf-8") as lines:
            for index, line in enumerate(lines):
                if line.strip() and index % (ranks * workers) == rank * workers + number:
                    yield "".join(to_pair(json.loads(line), self.tokenizer))

    def __iter__(self) -> Iterator[Row]:
        chance = random.Random(f"{self.seed} {self.epoch}")
        self.epoch += 1
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        waiting: list[Row] = []
        for text in self._mine():
            ids = [*self.tokenizer(text)["input_ids"], *end]
            for start in range(0, len(ids), self.max_length):
                piece = ids[start : start + self.max_length]
                if len(piece) < 2:
                    continue
                waiting.append({"input_ids": piece, "labels": piece})
                if len(waiting) > self.buffer:
                    yield waiting.pop(chance.randrange(len(waiting)))
        chance.shuffle(waiting)
        yield from waiting


class StreamingDataModule(L.LightningDataModule):
    """Batches of documents, padded to the longest.

    Args:
        data: JSON lines.
        tokenizer: checkpoint directory or name.
        batch_size: documents in a batch.
        max_length: of a document, in tokens.
        workers: processes that read.
        seed: of the order.
    """

    def __init__(
        self, data: str, tokenizer: str, batch_size: int = 8, max_length: int = 1024, workers: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(**pretrained_arguments(self.hparams["tokenizer"]))

    def collate(self, rows: list[Row]) -> Batch:
        return pad(rows, self.tokenizer.pad_token_id or 0)

    def train_dataloader(self) -> DataLoader[Any]:
        given = self.hparams
        documents = Documents(given["data"], self.tokenizer, given["max_length"], seed=given["seed"])
        return DataLoader(
            documents, batch_size=given["batch_size"], num_workers=given["workers"], collate_fn=self.collate
        )
