"""How many tokens each sample of a dataset has, as the model will see it; measured once and kept on disk.

In this order: the user's ``length_fn``; a column or attribute of lengths, or a token column of a Hugging Face dataset,
if some samples, measured, are as long as it says; else every sample goes through the user's own ``collate_fn`` alone,
in the loader's own workers, and its tokens are counted: whatever tokenising, truncating or templating happens there is
in the count.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from lightning_liger.data.counting import LENGTH_COLUMNS, NoLength, count_tokens
from lightning_liger.data.planner import Ints
from lightning_liger.data.randomness import random_numbers_untouched

_CHUNK = 64
_SAMPLED = 64


def sample_lengths(loader: DataLoader[Any], length_fn: Callable[[Any], int] | None, *, show_progress: bool) -> Ints:
    """``(len(dataset),)`` tokens of each sample of a map-style dataset.

    Args:
        loader: the training loader; its dataset, collate function and workers are used.
        length_fn: from a dataset sample to its number of tokens, when it cannot be found otherwise.
        show_progress: draw a progress bar while samples are measured.

    Raises:
        NoLength: naming what was found in a sample, and the remedy.
    """
    known = None if length_fn is not None else _recorded(loader)
    if known is not None:
        return known
    path = cache_path(loader, length_fn)
    kept = None if path is None else _kept(path, len(loader.dataset))  # type: ignore[arg-type]
    if kept is not None and _agrees(kept, loader, length_fn):
        return kept
    measured = _measure(loader, length_fn, show_progress)
    if path is not None:
        _keep(path, measured)
    return measured


# -- where lengths are written down already ------------------------------------------------------------------------


def _recorded(loader: DataLoader[Any]) -> Ints | None:
    dataset: Any = loader.dataset
    for name in LENGTH_COLUMNS:
        values = _column(dataset, name)
        if values is not None and len(values) == len(dataset):
            try:
                lengths = np.asarray(values, dtype=np.int64)
            except (TypeError, ValueError):
                continue  # a column of that name which holds something else
            if lengths.shape == (len(dataset),) and _agrees(lengths, loader, None):
                return lengths
    return _token_column(loader)


def _column(dataset: Any, name: str) -> Any:
    """A column of a Hugging Face dataset, or a sequence that the dataset has as an attribute."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, (list, tuple)):
        return dataset[name] if name in columns else None
    value = getattr(dataset, name, None)
    return value if isinstance(value, (Sequence, np.ndarray, Tensor)) and not isinstance(value, str) else None


def _token_column(loader: DataLoader[Any]) -> Ints | None:
    """From the Arrow table of a Hugging Face dataset, if the collate function leaves the samples as long as they are."""
    dataset: Any = loader.dataset
    table: Any = getattr(dataset, "data", None)
    if "input_ids" not in (getattr(dataset, "column_names", None) or ()) or not hasattr(table, "column"):
        return None
    import pyarrow.compute as arrow

    lengths = arrow.list_value_length(table.column("input_ids")).to_numpy()
    indices = getattr(dataset, "_indices", None)
    if indices is not None:
        lengths = lengths[indices.column(0).to_numpy()]
    lengths = np.asarray(lengths, dtype=np.int64)
    return lengths if _agrees(lengths, loader, None) else None


def _agrees(lengths: Ints, loader: DataLoader[Any], length_fn: Callable[[Any], int] | None) -> bool:
    """Whether some samples, measured now, are as long as ``lengths`` says; samples that hold no tokens cannot disagree."""
    some = _evenly(len(lengths))
    dataset: Any = loader.dataset
    with random_numbers_untouched():
        try:
            return _Counting(loader.collate_fn, length_fn)([dataset[i] for i in some]) == lengths[some].tolist()
        except NoLength:
            return True


def _evenly(count: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, min(count, _SAMPLED)).astype(int)).tolist()


# -- measuring -----------------------------------------------------------------------------------------------------


def _measure(loader: DataLoader[Any], length_fn: Callable[[Any], int] | None, show_progress: bool) -> Ints:
    count = _Counting(loader.collate_fn, length_fn)
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "num_workers": loader.num_workers,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    measuring: DataLoader[Any] = DataLoader(loader.dataset, batch_size=_CHUNK, collate_fn=count, **workers)
    found: list[int] = []
    # a dataset or a collate function that draws random numbers must not change what training draws
    with (
        random_numbers_untouched(),
        tqdm(
            total=len(loader.dataset),  # type: ignore[arg-type]
            desc="measuring lengths",
            unit=" samples",
            disable=not show_progress,
        ) as bar,
    ):
        for lengths in measuring:
            found.extend(lengths)
            bar.update(len(lengths))
    return np.asarray(found, dtype=np.int64)


class _Counting:
    """A collate function that answers with the number of tokens of each sample; picklable for spawned workers."""

    def __init__(self, collate: Callable[[list[Any]], Any], length_fn: Callable[[Any], int] | None) -> None:
        self.collate = collate
        self.length_fn = length_fn

    def __call__(self, samples: list[Any]) -> list[int]:
        return [count_tokens(sample, self.collate, self.length_fn) for sample in samples]


# -- kept on disk --------------------------------------------------------------------------------------------------


def cache_path(loader: DataLoader[Any], length_fn: Callable[[Any], int] | None) -> Path | None:
    """Where the lengths of this dataset under this collate function are kept; None if they cannot be recognised again.

    ``LIGHTNING_LIGER_CACHE`` names another directory than the user's cache, or, set to nothing, none.
    """
    directory = os.environ.get("LIGHTNING_LIGER_CACHE", str(Path.home() / ".cache" / "lightning_liger"))
    if not directory:
        return None
    dataset: Any = loader.dataset
    seal = hashlib.sha256()
    try:
        mark = getattr(dataset, "_fingerprint", None)
        if not isinstance(mark, str):
            with random_numbers_untouched():
                mark = [dataset[i] for i in _evenly(len(dataset))]
        seal.update(pickle.dumps((type(dataset).__qualname__, len(dataset), mark)))
        seal.update(pickle.dumps((loader.collate_fn, length_fn)))
    except Exception:  # samples or functions of the user's that cannot be pickled
        return None
    return Path(directory) / "lengths" / f"{seal.hexdigest()[:32]}.npy"


def _kept(path: Path, count: int) -> Ints | None:
    try:
        lengths = np.load(path)
    except (OSError, ValueError):  # not there, or cut short when it was written
        return None
    return lengths if lengths.shape == (count,) else None


def _keep(path: Path, lengths: Ints) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.npy")
        np.save(part, lengths)
        os.replace(part, path)
    except OSError:
        return  # a full or read-only disk costs a measurement next time
