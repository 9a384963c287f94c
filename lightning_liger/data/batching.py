"""Token-budget batches in a Trainer: the training loaders' batch samplers are rebuilt, and keep step with the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from lightning_liger.data.budget import choose_share
from lightning_liger.data.lengths import sample_lengths
from lightning_liger.data.order import Order, epoch_order, shared_by_ranks
from lightning_liger.data.out_of_memory import advice
from lightning_liger.data.planner import Cost, Ints
from lightning_liger.data.ranks import data_parallel, from_first_rank, random_seed
from lightning_liger.data.rebuilt import Truncating, with_batch_sampler
from lightning_liger.data.report import BatchingReport
from lightning_liger.data.sampler import Place, Share, TokenBatchSampler
from lightning_liger.data.stream import AgreeingLoader, packed_stream
from lightning_liger.hooks import TrainingHooks


class TokenBatches(TrainingHooks):
    """Rebuilds training loaders, and tells their samplers where training is.

    Args:
        budget: tokens per batch and rank, ``"auto"`` or ``"keep_samples"``: see :mod:`lightning_liger.data.budget`.
        length_fn: from a dataset sample to its tokens, see :func:`sample_lengths`.
        overlong: what becomes of samples of more than ``budget`` tokens.
        cost: what is balanced between ranks.
        report: is filled in.
    """

    def __init__(
        self,
        budget: int | str,
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
        self._seed: int | None = None
        self._place: Place | None = None
        self._samplers: list[TokenBatchSampler] = []
        self._streams: list[AgreeingLoader] = []
        self._told: list[int] = []  # lengths that Lightning knows
        self._resuming: list[dict[str, Any]] = []
        self._asked_before: int | str | None = None
        self._resumed_late = False

    # -- loaders ---------------------------------------------------------------------------------------------------

    def rebuild(self, loader: Any, trainer: Any) -> Any:
        """The training loader with batches by token count; anything that is no ``DataLoader`` stays as it is.

        Raises:
            ValueError: samples over the budget, or a loader whose batches are not its own to make.
        """
        if not isinstance(loader, DataLoader):
            self.report.refuse(f"a {type(loader).__name__} is no DataLoader and keeps its batches")
            return loader
        if isinstance(loader.dataset, IterableDataset):
            return self._stream(loader, *data_parallel(trainer.strategy))
        strategy = trainer.strategy
        ranks, rank = data_parallel(strategy)
        if loader.batch_sampler is not None and ranks > 1 and not shared_by_ranks(loader):
            raise ValueError(
                "max_tokens_per_batch divides one dataset among ranks, but with use_distributed_sampler=False and a "
                f"{type(loader.sampler).__name__} every rank reads a loader of its own. Let Lightning divide it, give the "
                "loader a DistributedSampler, or leave max_tokens_per_batch out."
            )
        before = len(loader)
        if self._seed is None:
            # not two ranks may plan differently, whatever their generators or disks hold
            self._seed = from_first_rank(strategy, random_seed)
        lengths: Ints = from_first_rank(strategy, lambda: sample_lengths(loader, self._length_fn, show_progress=True))
        order = epoch_order(loader, self._seed)
        if self._place is None:
            self._place = Place(trainer.current_epoch, 0)
        share = self._share_of_checkpoint(len(self._samplers), ranks)
        if share is None:
            drawn = len(order.draw(order.seed, self._place.epoch))
            share = choose_share(self.budget, lengths, drawn, before, ranks, loader, trainer, self.report)
        self._check_overlong(lengths, share.budget)
        sampler = TokenBatchSampler(
            self._without_overlong(order, lengths, share.budget),
            lengths,
            share,
            rank=rank,
            cost=self._cost(),
            one_epoch=trainer.overfit_batches > 0,
        )
        self._samplers.append(sampler)
        # Lightning may ask for loaders twice before it trains
        self._resumed_late |= len(self._samplers) > len(self._resuming) > 0
        sampler.seek(self._place)
        self._resume()
        made = with_batch_sampler(loader, sampler)
        if self._overlong == "truncate" and self.report.overlong:
            made.collate_fn = Truncating(loader.collate_fn, share.budget)
        self._told.append(len(sampler))
        self._note(sampler, lengths, before)
        return made

    def _note(self, sampler: TokenBatchSampler, lengths: Ints, before: int) -> None:
        report, share = self.report, sampler.share
        report.budget, report.samples = share.budget, len(lengths)
        report.steps_before, report.steps = before, len(sampler)
        tokens = int(np.minimum(lengths, share.budget).sum())
        report.fill = tokens / (len(sampler) * share.ranks * share.budget)
        report.overlong_are = {"truncate": "are cut", "skip": "are left out"}.get(
            self._overlong, "are batches of their own"
        )

    def _stream(self, loader: DataLoader[Any], ranks: int, rank: int) -> AgreeingLoader:
        if loader.batch_size is None:
            raise ValueError(
                "max_tokens_per_batch needs single samples, and this stream makes its own batches "
                "(DataLoader(batch_size=None)). Let it yield samples, or leave max_tokens_per_batch out."
            )
        if not isinstance(self.budget, int):
            raise ValueError(
                f"max_tokens_per_batch={self.budget!r} needs the lengths of all samples, and a stream "
                f"({type(loader.dataset).__name__}) has no length. Give a number of tokens, such as 16384."
            )
        self.report.streams += 1
        self.report.budget = self.budget
        overlong = "own_batch" if self._overlong == "truncate" else self._overlong
        if self._overlong == "truncate":
            loader = copy.copy(loader)
            loader.collate_fn = Truncating(loader.collate_fn, self.budget)
        self._streams.append(packed_stream(loader, self.budget, self._length_fn, overlong, ranks, rank))
        return self._streams[-1]

    def _check_overlong(self, lengths: Ints, budget: int) -> None:
        over = int((lengths > budget).sum())
        self.report.overlong = over
        if over and self._overlong == "error":
            raise ValueError(
                f"{over:,} of {len(lengths):,} samples have more tokens than max_tokens_per_batch={budget:,} "
                f"(the longest is sample {int(lengths.argmax())} with {int(lengths.max()):,}). Raise the budget, "
                "shorten the samples, or choose overlong='truncate', 'skip' or 'own_batch'."
            )

    def _without_overlong(self, order: Order, lengths: Ints, budget: int) -> Order:
        if self._overlong != "skip" or lengths.max() <= budget:
            return order

        def shorter(seed: int, epoch: int) -> Ints:
            indices = order.draw(seed, epoch)
            return indices[lengths[indices] <= budget]

        return replace(order, draw=shorter)

    # -- keeping step ----------------------------------------------------------------------------------------------

    def begin_epoch(self, trainer: Any, module: Any) -> None:
        """Seek its place.

        Epochs are counted here by what was drawn: to Lightning, one that ``max_steps`` cut short is over, although a
        resumed training goes on in its middle.
        """
        self._forget_replaced(trainer.fit_loop)
        if self._place is None:
            return
        if self._place.steps and not trainer.fit_loop.epoch_loop.restarting:
            self._place = Place(self._place.epoch + 1, 0)
        self._seek(trainer)
        self._tell_steps(trainer)

    def begin_training(self, trainer: Any, module: Any) -> None:
        """Make the iterator anew if it was made before the checkpoint was read (``estimated_stepping_batches``)."""
        self._forget_replaced(trainer.fit_loop)
        over = self._place is not None and any(self._place.steps >= len(s) for s in self._samplers)
        if self._resumed_late or (over and not _cycled(trainer)):
            self._resumed_late = False
            self._resume()
            self._tell_steps(trainer)
            self._seek(trainer)
            trainer.fit_loop._load_combined_loader_states()
            iter(trainer.fit_loop._data_fetcher)

    def end_batch(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self._resuming = []  # loaders that are asked for anew begin an epoch
        for stream in self._streams:
            stream.end_batch(last=trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
        if self._place is not None:
            epoch, done = self._place.epoch, self._place.steps + 1
            self._place = Place(epoch + 1, 0) if done >= trainer.num_training_batches else Place(epoch, done)

    def describe_batch(self) -> str:
        """For a batch that does not fit into memory."""
        batches = [] if self._place is None else [sampler.tokens(self._place) for sampler in self._samplers]
        longest = max((sampler.longest for sampler in self._samplers), default=0)
        return advice(batches, self.report.budget, longest)

    def _seek(self, trainer: Any) -> None:
        if self._place is not None:
            for sampler in self._samplers:
                sampler.seek(self._place, cycled=_cycled(trainer))

    def _forget_replaced(self, fit_loop: Any) -> None:
        """Samplers of loaders that Lightning has asked for anew (``reload_dataloaders_every_n_epochs``)."""
        if fit_loop._combined_loader is None:
            return
        loaders = fit_loop._combined_loader.flattened
        self._streams = [stream for stream in self._streams if any(stream is loader for loader in loaders)]
        live = {id(getattr(loader, "batch_sampler", None)) for loader in loaders}
        kept = [(s, n) for s, n in zip(self._samplers, self._told, strict=True) if id(s) in live]
        self._samplers, self._told = [s for s, _ in kept], [n for _, n in kept]

    def _tell_steps(self, trainer: Any) -> None:
        """Lightning asks for lengths once; a sampler with replacement, or other ranks after a resume, change them."""
        fit_loop = trainer.fit_loop
        loaders = fit_loop._combined_loader
        if loaders is None or all(len(s) == n for s, n in zip(self._samplers, self._told, strict=False)):
            return
        self._told = [len(s) for s in self._samplers]
        steps = dict(zip(map(id, self._samplers), self._told, strict=True))
        limit = trainer.limit_train_batches
        limits = []
        for loader, old in zip(loaders.flattened, loaders.limits, strict=True):
            length = steps.get(id(getattr(loader, "batch_sampler", None)))
            limits.append(
                old if length is None else min(limit, length) if isinstance(limit, int) else int(limit * length)
            )
        loaders.limits = limits
        # the iterator that is there still has the old limits; not len(), which takes no infinity
        fit_loop.max_batches = type(loaders._iterator)(loaders.flattened, limits).__len__()
        every = trainer.val_check_interval
        if isinstance(every, float) and trainer.val_check_batch not in (None, float("inf")):
            trainer.val_check_batch = max(1, int(fit_loop.max_batches * every))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        place = self._place
        return {
            "seed": self._seed,
            "asked": self.budget,
            "progress": [] if place is None else [sampler.progress(place) for sampler in self._samplers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed = state["seed"]
        self._resuming = state["progress"]
        self._asked_before = state["asked"]
        self._resumed_late = bool(self._samplers)
        self._resume()

    def _resume(self) -> None:
        """Give what the checkpoint says to the samplers that are there, in their order."""
        for number, (sampler, progress) in enumerate(zip(self._samplers, self._resuming, strict=False)):
            share = self._share_of_checkpoint(number, sampler.share.ranks)
            if share is not None:
                sampler.share, self.report.budget = share, share.budget
            sampler.resume(progress)
            self._place = sampler.place

    def _share_of_checkpoint(self, number: int, ranks: int) -> Share | None:
        """What was found for a loader before: a search may find a little more or less now, and other batches."""
        if isinstance(self.budget, int) or self.budget != self._asked_before or number >= len(self._resuming):
            return None
        share = Share(*self._resuming[number]["share"])
        if share.ranks != ranks:
            return None
        self.report.found = f"{share.budget:,} tokens as in the checkpoint"
        return share


def _cycled(trainer: Any) -> bool:
    """Whether a loader that ends before others begins again."""
    return bool(trainer.fit_loop._combined_loader._mode == "max_size_cycle")
