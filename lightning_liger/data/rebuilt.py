"""What a training loader becomes: a copy of it with another batch sampler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from lightning_liger.data.sampler import TokenBatchSampler


def with_batch_sampler(loader: DataLoader[Any], sampler: TokenBatchSampler) -> DataLoader[Any]:
    """A copy that shares all else; whatever arguments the loader's own class was made with."""
    made = copy.copy(loader)
    for name, value in (
        ("batch_sampler", sampler),
        ("batch_size", None),
        ("drop_last", False),
        ("sampler", sampler.sampler),
    ):
        object.__setattr__(made, name, value)  # DataLoader lets nobody but its constructor do so
    if not hasattr(loader.dataset, "state_dict"):
        # What Lightning looks for before it warns that a resumed epoch starts over. A loader of torchdata's would count
        # the batches a second time.
        made.state_dict = sampler.state_dict
        made.load_state_dict = sampler.load_state_dict
    elif hasattr(made, "snapshot_every_n_steps"):
        made.snapshot_every_n_steps = 1  # between snapshots it would skip batches, and so does the sampler
    return made


class Truncating:
    """A collate function that cuts a sample of more than ``budget`` tokens; it is alone in its batch."""

    def __init__(self, collate: Callable[[list[Any]], Any], budget: int) -> None:
        self.collate = collate
        self.budget = budget

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        if len(samples) > 1:
            return batch
        widths = {t.shape[1] for t in tree_leaves(batch) if _is_token_row(t)}
        if len(widths) != 1 or max(widths) <= self.budget:
            return batch
        (width,) = widths
        cut = lambda t: t[:, : self.budget] if _is_token_row(t) and t.shape[1] == width else t  # noqa: E731
        return tree_map(cut, batch)


def _is_token_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2 and len(value) == 1
