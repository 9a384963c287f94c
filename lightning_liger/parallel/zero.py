"""Checkpoints that Lightning's ``DeepSpeedStrategy`` writes: a directory with a piece of everything from each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_TAG = "checkpoint"  # the folder that Lightning has DeepSpeed write into
# what DeepSpeed keeps beside the user's part (``deepspeed.runtime.engine.save_checkpoint``)
_WEIGHTS = "module"


def is_zero(folder: Path) -> bool:
    """Whether ``folder`` was written by DeepSpeed under Lightning."""
    return folder.is_dir() and any((folder / _TAG).glob("*_model_states.pt"))


def read(folder: Path) -> dict[str, Any]:
    """The Lightning checkpoint of a DeepSpeed directory, with whole fp32 weights under ``state_dict``.

    Optimizer states stay in their pieces and are not read.

    Raises:
        ImportError: ``deepspeed``, whose own conversion is used, is not installed.
    """
    pieces = sorted((folder / _TAG).glob("*_model_states.pt"))
    # a rank's file holds the same user's part as any other's
    first: dict[str, Any] = torch.load(pieces[0], map_location="cpu", weights_only=False)
    if any((folder / _TAG).glob("*_optim_states.pt")):
        first["state_dict"] = _merged(folder)
    else:  # ZeRO stage 0 leaves everything whole
        first["state_dict"] = first[_WEIGHTS]
    first.pop(_WEIGHTS, None)
    return first


def _merged(folder: Path) -> dict[str, Any]:
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as error:
        raise ImportError(
            f"{folder} was written by DeepSpeed, whose own code puts its pieces together: pip install deepspeed"
        ) from error
    merged: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=_TAG)
    return merged
