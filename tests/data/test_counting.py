"""Tokens of one sample, in whatever its collate function makes of it."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Rows, lengths, loader, masked
from torch.utils.data import DataLoader, Dataset

from lightning_liger.data.counting import NoLength, tokens_of
from lightning_liger.data.lengths import sample_lengths

IDS = torch.tensor([[5, 8, 5, 9, 0, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]])
ANSWER = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0]])  # of the loss
LABELS = torch.tensor([[-100, -100, 5, 9, -100, -100, -100, -100]])
PAIR = {"chosen_input_ids": IDS, "chosen_attention_mask": MASK, "rejected_attention_mask": MASK[:, :6]}


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}, 4),
        (UserDict(input_ids=IDS, attention_mask=MASK.bool()), 4),
        ({"input_ids": IDS, "loss_mask": ANSWER, "attention_mask": MASK}, 4),
        ({"input_ids": IDS, "loss_mask": ANSWER}, 5),  # one of the tail may end the text
        ({"x": IDS, "pad_mask": MASK}, 4),
        ({"input_ids": IDS, "labels": LABELS}, 5),
        ((IDS, LABELS), 5),
        ((IDS, MASK, LABELS), 4),
        ([IDS, ANSWER], 5),
        (SimpleNamespace(ids=IDS, mask=MASK), 4),
        (IDS, 5),
        ({"input_ids": IDS.flip(1), "attention_mask": MASK.flip(1)}, 4),
        ({"inner": {"tokens": IDS}}, 5),
        (PAIR, 8),
        ({"chosen_input_ids": IDS, "rejected_input_ids": IDS[:, :3]}, 8),
        ({"input_ids": IDS[:, :4], "attention_mask": torch.tensor([[1, 1, 2, 2]])}, 4),
    ],
)
def test_tokens_without_padding(batch: Any, tokens: int) -> None:
    assert tokens_of(batch) == tokens


def test_what_holds_none() -> None:
    for batch in ({"pixels": torch.zeros(1, 8)}, [torch.zeros(3)], {"number": torch.zeros(1)}):
        with pytest.raises(NoLength, match="length_fn"):
            tokens_of(batch)


class Texts(Dataset[str]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> str:
        return "abcdefghijkl"[: index + 1]


def tokenised(texts: list[str]) -> dict[str, Any]:
    ids = torch.zeros(len(texts), 16, dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor([ord(c) for c in text])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def test_strings_that_the_collate_function_tokenises() -> None:
    data: Any = DataLoader(Texts(), batch_size=3, collate_fn=tokenised)
    assert sample_lengths(data, None, show_progress=False).tolist() == list(range(1, 13))


class Table(Rows):
    """The columns of a Hugging Face dataset."""

    def __init__(self, **columns: Any) -> None:
        super().__init__()
        self.columns = columns
        self.column_names = list(columns)
        self.read = 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self.columns[index]
        self.read += 1
        return super().__getitem__(index)


def test_a_column_of_lengths_is_believed_where_it_agrees() -> None:
    big = 40 * lengths()  # the stand-in has 60 rows; a column of another size is none of lengths
    for columns in ({"length": lengths()}, {"num_tokens": np.array(lengths())}, {"length": [1] * 60}, {"length": big}):
        data = Table(**columns)
        assert sample_lengths(DataLoader(data, 4, collate_fn=masked), None, show_progress=False).tolist() == lengths()
    # where the batch shows no tokens, the column is all there is
    table = Table(length=[7] * 60)
    blind: Any = DataLoader(table, 4, collate_fn=lambda samples: torch.zeros(len(samples)))
    assert set(sample_lengths(blind, None, show_progress=False).tolist()) == {7}


def test_lengths_are_measured_once() -> None:
    data = loader()
    sample_lengths(data, None, show_progress=False)
    again = Table()
    again.column_names = None  # type: ignore[assignment]
    first: Any = DataLoader(again, 4, collate_fn=masked)
    sample_lengths(first, None, show_progress=False)
    before = again.read
    sample_lengths(first, None, show_progress=False)
    assert before >= 120 and again.read - before <= 120, (
        "the second time, some samples are looked at and none is counted"
    )
