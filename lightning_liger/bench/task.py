"""A training that any framework can do: a model, samples in order, and how both are to be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

Sample = tuple[Tensor, int]
"""Token ids, and how many of them are the prompt, whose labels do not count."""


@dataclass(frozen=True)
class Task:
    """
    Attributes:
        shape: keyword arguments of ``transformers.Qwen2Config``.
        model: builds the transformers model on the default device, in the default dtype.
        loader: given a collate function, the DataLoader of the plain run, from its beginning.
        collate: the plain run's.
        precision: Lightning's name of it.
        learning_rate: of AdamW, with torch's defaults for the rest.
    """

    shape: Mapping[str, Any]
    model: Callable[[], Any]
    loader: Callable[[Callable[[list[Sample]], Any]], DataLoader[Sample]]
    collate: Callable[[list[Sample]], dict[str, Tensor]]
    precision: str
    learning_rate: float

    def batches(self, count: int) -> list[list[Sample]]:
        """The samples of the first batches of the plain run.

        Raises:
            ValueError: there are not so many.
        """
        found = list(islice(self.loader(list), count))
        if len(found) < count:
            raise ValueError(f"the data has {len(found)} batches, of which {count} are needed: ask for fewer steps.")
        return found
