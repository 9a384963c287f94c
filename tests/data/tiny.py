"""A module that trains in no time and writes down which samples it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from helpers import QUIET, documents
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_liger import LigerCallback

COUNT, BUDGET = 60, 64


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(128, 4)
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, self.numbers(batch)))
        return self.table.weight.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.trainer.fit_loop.epoch_loop.batch_idx)

    def numbers(self, batch: Any) -> list[int]:
        numbers: list[int] = batch["number"].tolist()
        return numbers

    def epoch(self, number: int) -> list[list[int]]:
        return [numbers for epoch, numbers in self.seen if epoch == number]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2)


class Rows(Dataset[Any]):
    """Documents that know their number; ``(number, ids)``."""

    def __init__(self, count: int = COUNT) -> None:
        self.rows = [row.ids for row in documents(count, seed=5)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return index, self.rows[index]


def lengths(count: int = COUNT) -> list[int]:
    return [len(row) for row in Rows(count).rows]


def masked(samples: list[Any]) -> dict[str, Tensor]:
    """Padded to a fixed length, with a mask."""
    rows = [row for _, row in samples]
    mask = torch.tensor([[1] * len(r) + [0] * (32 - len(r)) for r in rows])
    ids = torch.stack([torch.nn.functional.pad(r, (0, 32 - len(r))) for r in rows])
    return {"input_ids": ids, "attention_mask": mask, "number": torch.tensor([i for i, _ in samples])}


def loader(count: int = COUNT, *, kind: Any = DataLoader, **changes: Any) -> DataLoader[Any]:
    made: DataLoader[Any] = kind(Rows(count), **{"batch_size": 4, "shuffle": True, "collate_fn": masked, **changes})
    return made


def trainer(budget: Any = BUDGET, strategy: Any = "auto", **options: Any) -> L.Trainer:
    L.seed_everything(options.pop("seed", 3), verbose=False)
    ours = LigerCallback(
        verbose=False, max_tokens_per_batch=budget, padding_free=False, fused_head=False, **options.pop("ours", {})
    )
    given = {**QUIET, "max_steps": -1, "max_epochs": 2, **options}
    return L.Trainer(strategy=strategy, callbacks=[ours, *given.pop("callbacks", [])], **given)


def fit(data: Any, *, module: Tiny | None = None, path: Any = None, val: Any = None, **options: Any) -> Tiny:
    module = module or Tiny()
    trainer(**options).fit(module, data, val, ckpt_path=path)
    return module


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def report(module: Tiny) -> dict[str, Any]:
    found: dict[str, Any] = next(
        c.report.to_dict()["token_batches"] for c in module.trainer.callbacks if isinstance(c, LigerCallback)
    )
    return found


Make = Callable[[], DataLoader[Any]]
