"""Let ``LightningModule.load_from_checkpoint`` take a sharded directory, and make one file of it."""

from __future__ import annotations

import argparse
import functools
import importlib
from pathlib import Path
from typing import Any

from lightning_liger.parallel import files, optimizer_states, sharded, single


def consolidate(directory: str | Path, file: str | Path | None = None) -> Path:
    """Make one ordinary Lightning checkpoint of a sharded directory, optimizer state included.

    Runs in one process and needs host memory for the whole checkpoint. The module's code is not needed.

    Args:
        directory: What ``state_dict_type="sharded"`` or Lightning's ``ModelParallelStrategy`` saved.
        file: Where to write; ``directory`` with ``.consolidated`` appended when left out.

    Returns:
        The file.

    Raises:
        ValueError: ``directory`` is no sharded checkpoint.
        FileExistsError: ``file`` is there already.
    """
    directory = files.existing(Path(directory))
    out = Path(file) if file is not None else directory.with_name(directory.name + ".consolidated")
    if not sharded.is_sharded(directory):
        raise ValueError(f"{directory} is no sharded checkpoint: it lacks {sharded.META} or .metadata.")
    if out.exists():
        raise FileExistsError(f"{out} exists. Remove it, or name another file.")
    # written by this user's own training, and pickled files are what Lightning makes of it
    checkpoint = sharded.read(directory, {}, weights_only=False, alone=True)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [optimizer_states.numbered(s) for s in checkpoint["optimizer_states"]]
    single.write(checkpoint, files.start(out))
    files.publish(out)
    return out


def load_directories(tree: str) -> None:
    """Let ``load_from_checkpoint`` of ``tree`` (``"lightning.pytorch"``, ``"pytorch_lightning"``) read directories.

    Lightning raises ``IsADirectoryError`` for them; everything else is left to it.
    """
    saving: Any = importlib.import_module(f"{tree}.core.saving")
    if not getattr(saving.pl_load, "reads_directories", False):
        saving.pl_load = _reading_directories(saving.pl_load)


def _reading_directories(load: Any) -> Any:
    @functools.wraps(load)
    def pl_load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path_or_url, (str, Path)) and sharded.is_sharded(Path(path_or_url)):
            weights = lambda at: not str(at[0]).startswith("optimizer_")  # noqa: E731
            return sharded.read(Path(path_or_url), {}, weights, kwargs.get("weights_only"), alone=True)
        return load(path_or_url, *args, **kwargs)

    pl_load.reads_directories = True  # type: ignore[attr-defined]
    return pl_load


def main() -> None:
    """``python -m lightning_liger.parallel.directories DIRECTORY [FILE]``."""
    parser = argparse.ArgumentParser(description="Make one Lightning checkpoint file of a sharded directory.")
    parser.add_argument("directory")
    parser.add_argument("file", nargs="?")
    given = parser.parse_args()
    print(consolidate(given.directory, given.file))


if __name__ == "__main__":
    main()
