"""Token-budget batches in a Trainer: the training loaders' batch samplers are rebuilt, and keep step with the loop."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from lightning_liger.data.lengths import sample_lengths
from lightning_liger.data.order import epoch_order
from lightning_liger.data.planner import Cost, Ints
from lightning_liger.data.report import BatchingReport
from lightning_liger.data.sampler import Place, Share, TokenBatchSampler
from lightning_liger.data.stream import AgreeingLoader, packed_stream

OVERLONG = ("error", "truncate", "skip", "own_batch")


class TokenBatches:
    """Rebuilds training loaders, and tells their samplers where training is.

    Args:
        budget: tokens per batch and rank.
        length_fn: from a dataset sample to its tokens, see :func:`sample_lengths`.
        overlong: what becomes of samples of more than ``budget`` tokens: see :data:`OVERLONG`.
        cost: what is balanced between ranks.
        report: is filled in.
    """

    def __init__(
        self,
        budget: int,
        length_fn: Callable[[Any], int] | None,
        overlong: str,
        cost: Callable[[], Cost],
        report: BatchingReport,
    ) -> None:
        self.budget = budget
        self.report = report
        self._length_fn = length_fn
        self._overlong = overlong
        self._cost = cost
        self._place = Place(0, 0)
        self._samplers: list[TokenBatchSampler] = []
        self._told: list[int] = []  # lengths that Lightning knows
        self._resuming: list[dict[str, Any]] = []
        self._resumed_late = False

    # -- loaders ---------------------------------------------------------------------------------------------------

    def rebuild(self, loader: Any, strategy: Any, epoch: int) -> Any:
        """The training loader with batches by token count; anything that is no ``DataLoader`` stays as it is.

        Raises:
            ValueError: samples over the budget, or a loader whose batches are not its own to make.
        """
        if not isinstance(loader, DataLoader):
            self.report.refuse(f"a {type(loader).__name__} is no DataLoader and keeps its batches")
            return loader
        if isinstance(loader.dataset, IterableDataset):
            return self._stream(loader)
        before = len(loader)
        # not two ranks may plan differently, whatever their generators or disks hold
        seed = strategy.broadcast(_seed())
        lengths = strategy.broadcast(self._lengths(loader) if strategy.is_global_zero else None)
        ranks, rank = data_parallel(strategy)
        sampler = TokenBatchSampler(
            self._without_overlong(epoch_order(loader, seed), lengths),
            lengths,
            Share(ranks, self.budget),
            rank=rank,
            seed=seed,
            cost=self._cost(),
        )
        self._samplers.append(sampler)
        self._place = Place(epoch, 0)
        sampler.seek(self._place)
        self._resume()
        made = _with_batch_sampler(loader, sampler)
        if self._overlong == "truncate" and self.report.overlong:
            made.collate_fn = Truncating(loader.collate_fn, self.budget)
        self._told.append(len(sampler))
        self.report.budget, self.report.samples = self.budget, len(lengths)
        self.report.steps_before, self.report.steps = before, sampler.steps(self._place.epoch)
        self.report.overlong_are = {"truncate": "are cut", "skip": "are left out"}.get(
            self._overlong, "are batches of their own"
        )
        tokens = int(np.minimum(lengths, self.budget).sum())
        self.report.fill = tokens / (len(sampler) * ranks * self.budget)
        return made

    def _stream(self, loader: DataLoader[Any]) -> AgreeingLoader:
        if loader.batch_size is None:
            raise ValueError(
                "max_tokens_per_batch needs single samples, and this stream makes its own batches "
                "(DataLoader(batch_size=None)). Let it yield samples, or leave max_tokens_per_batch out."
            )
        self.report.streams += 1
        self.report.budget = self.budget
        overlong = "own_batch" if self._overlong == "truncate" else self._overlong
        if self._overlong == "truncate":
            loader = copy.copy(loader)
            loader.collate_fn = Truncating(loader.collate_fn, self.budget)
        return packed_stream(loader, self.budget, self._length_fn, overlong)

    def _lengths(self, loader: DataLoader[Any]) -> Ints:
        lengths = sample_lengths(loader, self._length_fn, show_progress=True)
        over = np.flatnonzero(lengths > self.budget)
        self.report.overlong = len(over)
        if len(over) and self._overlong == "error":
            raise ValueError(
                f"{len(over):,} of {len(lengths):,} samples have more tokens than max_tokens_per_batch={self.budget:,} "
                f"(the longest is sample {int(lengths.argmax())} with {int(lengths.max()):,}). Raise the budget, "
                "shorten the samples, or choose overlong='truncate', 'skip' or 'own_batch'."
            )
        return lengths

    def _without_overlong(self, order: Callable[[int], Ints], lengths: Ints) -> Callable[[int], Ints]:
        if self._overlong != "skip" or lengths.max() <= self.budget:
            return order

        def shorter(epoch: int) -> Ints:
            indices = order(epoch)
            return indices[lengths[indices] <= self.budget]

        return shorter

    # -- keeping step ----------------------------------------------------------------------------------------------

    def begin_epoch(self, trainer: Any) -> None:
        """Before the loop asks for the epoch's iterator.

        Epochs are counted here by what was drawn: to Lightning, one that ``max_steps`` cut short is over, although a
        resumed training goes on in its middle.
        """
        if self._place.steps and not trainer.fit_loop.epoch_loop.restarting:
            self._place = Place(self._place.epoch + 1, 0)
        self._forget_replaced(trainer.fit_loop)
        for sampler in self._samplers:
            sampler.seek(self._place)
        self._tell_steps(trainer.fit_loop)

    def begin_training(self, trainer: Any) -> None:
        """Make the iterator anew if it was made before the checkpoint was read (``estimated_stepping_batches``)."""
        if self._resumed_late:
            self._resumed_late = False
            self._tell_steps(trainer.fit_loop)
            for sampler in self._samplers:
                sampler.seek(self._place)
            trainer.fit_loop._load_combined_loader_states()
            iter(trainer.fit_loop._data_fetcher)

    def end_batch(self, trainer: Any) -> None:
        epoch, done = self._place.epoch, self._place.steps + 1
        self._place = Place(epoch + 1, 0) if done >= trainer.num_training_batches else Place(epoch, done)

    def _forget_replaced(self, fit_loop: Any) -> None:
        """Samplers of loaders that Lightning has asked for anew (``reload_dataloaders_every_n_epochs``)."""
        live = {id(getattr(loader, "batch_sampler", None)) for loader in fit_loop._combined_loader.flattened}
        kept = [(s, n) for s, n in zip(self._samplers, self._told, strict=True) if id(s) in live]
        self._samplers, self._told = [s for s, _ in kept], [n for _, n in kept]

    def _tell_steps(self, fit_loop: Any) -> None:
        """Lightning asks for lengths once; a sampler with replacement, or other ranks after a resume, change them."""
        loaders = fit_loop._combined_loader
        if loaders is None or all(len(s) == n for s, n in zip(self._samplers, self._told, strict=False)):
            return
        old, self._told = self._told, [len(s) for s in self._samplers]
        given = dict(zip(map(id, self._samplers), zip(old, self._told, strict=True), strict=True))
        limits = []
        for loader, limit in zip(loaders.flattened, loaders.limits, strict=True):
            was, now = given.get(id(getattr(loader, "batch_sampler", None)), (None, None))
            limits.append(now if limit == was else limit)
        loaders.limits = limits
        # the iterator that is there still has the old limits
        fit_loop.max_batches = len(type(loaders._iterator)(loaders.flattened, limits))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"progress": [sampler.progress(self._place) for sampler in self._samplers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resuming = state["progress"]
        self._resumed_late = bool(self._samplers)
        self._resume()

    def _resume(self) -> None:
        """Give what the checkpoint says to the samplers that are there, in their order."""
        for sampler, progress in zip(self._samplers, self._resuming, strict=False):
            sampler.resume(progress)
            self._place = sampler.place


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


def _with_batch_sampler(loader: DataLoader[Any], sampler: TokenBatchSampler) -> DataLoader[Any]:
    """A copy that shares all else; whatever arguments the loader's own class was made with."""
    made = copy.copy(loader)
    for name, value in (
        ("batch_sampler", sampler),
        ("batch_size", None),
        ("drop_last", False),
        ("sampler", sampler.sampler),
    ):
        object.__setattr__(made, name, value)  # DataLoader lets nobody but its constructor do so
    if not hasattr(made, "state_dict"):
        # what Lightning looks for before it warns that a resumed epoch starts over
        made.state_dict = sampler.state_dict
        made.load_state_dict = sampler.load_state_dict
    return made


def data_parallel(strategy: Any) -> tuple[int, int]:
    """Number of ranks with data of their own, and which one this is."""
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
    return kwargs["num_replicas"], kwargs["rank"]


def _seed() -> int:
    given = os.environ.get("PL_GLOBAL_SEED")
    return int(given) if given is not None else torch.initial_seed() % 2**31
