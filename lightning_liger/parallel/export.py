"""Hugging Face checkpoints from a module that trains, or from a Lightning checkpoint on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_liger.parallel import files, huggingface, sharded, single, zero
from lightning_liger.parallel.checkpoint import module_state
from lightning_liger.parallel.host import Room, size_of
from lightning_liger.parallel.pieces import gather, plain_name
from lightning_liger.parallel.together import is_first, together


def save_hf(
    module: nn.Module,
    out: str | Path,
    model: str | None = None,
    dtype: torch.dtype | str | None = None,
    tokenizer: Any = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write a Hugging Face model that is inside of ``module``, sharded or not. Every rank calls it.

    Weights are gathered one at a time to the host memory of rank 0, in ``dtype``; other ranks keep nothing.

    Args:
        module: A LightningModule, or any module.
        out: Directory for ``from_pretrained``. A PEFT model writes its adapters alone.
        model: Path of the model inside ``module``, when several train.
        dtype: Of the floating-point weights in the file, ``torch.bfloat16`` or ``"bfloat16"``; as trained if left out.
        tokenizer: Saved beside; the module's own if it has one.
        max_shard_size: Of one file of weights.

    Raises:
        ValueError: there is no model, or several and ``model`` does not say which.
        RuntimeError: on every rank, when writing failed.
    """
    models = huggingface.find_models(module)
    trains = {p: any(q.requires_grad for q in m.parameters()) for p, m in models.items()}
    path = huggingface.choose(models, model, trains)
    chosen = models[path]
    prefix = f"{path}." if path else ""
    # taken through the module, so that gathered groups are resharded first
    state = {k.removeprefix(prefix): v for k, v in _plainly(module_state(module)).items() if k.startswith(prefix)}
    wanted = set(huggingface.needed_names(chosen, state))
    cast = _dtype(dtype)
    whole = _gathered({name: value for name, value in state.items() if name in wanted}, cast, Path(out))
    kept = tokenizer if tokenizer is not None else huggingface.find_tokenizer(module)
    act = lambda: huggingface.write(chosen, whole, Path(out), kept, max_shard_size)  # noqa: E731
    together(act if is_first() else None, f"Exporting to {out}")


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    model: str | None = None,
    dtype: torch.dtype | str | None = None,
    tokenizer: Any = None,
    module: nn.Module | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write a Hugging Face model from a Lightning checkpoint, in one process.

    Args:
        checkpoint: A file, a sharded directory, or the directory of a DeepSpeed strategy. Tensors stay in the file until they are written.
        out, model, dtype, tokenizer, max_shard_size: As in :func:`save_hf`.
        module: The LightningModule, for checkpoints that this package did not save and models with code of their own.

    Raises:
        ValueError: the checkpoint does not describe its model, and there is no ``module``.
    """
    source = files.existing(Path(checkpoint))
    weights = lambda at: not str(at[0]).startswith(("optimizer_", "pieces"))  # noqa: E731
    if zero.is_zero(source):
        loaded = zero.read(source)
    elif source.is_dir():
        loaded = sharded.read(source, {}, weights, weights_only=False, alone=True)
    else:
        loaded = single.read(source, weights_only=False)
    descriptions = loaded.get(huggingface.KEY, {}) if module is None else huggingface.describe(module)
    if not descriptions:
        raise ValueError(
            f"{source} does not say which Hugging Face model it is of: only liger_fsdp and LigerCallback under DeepSpeed say so. Give the module"
            " that it belongs to: --module package.module:LightningModuleClass."
        )
    path = huggingface.choose(descriptions, model, {p: d["trains"] for p, d in descriptions.items()})
    chosen = huggingface.find_models(module)[path] if module is not None else huggingface.rebuild(descriptions[path])
    prefix = f"{path}." if path else ""
    cast = _dtype(dtype)
    state = {k.removeprefix(prefix): v for k, v in _plainly(loaded["state_dict"]).items() if k.startswith(prefix)}
    wanted = set(huggingface.needed_names(chosen, state))
    ready = {k: _cast(v, cast) for k, v in state.items() if k in wanted}
    huggingface.write(chosen, ready, Path(out), tokenizer, max_shard_size)


def _plainly(state: dict[str, Any]) -> dict[str, Any]:
    return {plain_name(name): value for name, value in state.items()}


def _gathered(state: dict[str, Tensor], dtype: torch.dtype | None, folder: Path) -> dict[str, Tensor]:
    """Whole tensors on rank 0, nothing elsewhere; a tensor under two names is one."""
    room = Room(size_of(state.values()), folder) if is_first() else None
    made: dict[int, Tensor] = {}
    for value in {id(v): v for v in state.values()}.values():
        cast = _cast(value.detach(), dtype)  # before it travels: half the bytes for bf16
        gathered = gather(cast) if isinstance(cast, DTensor) else cast
        if room is not None:
            made[id(value)] = room.keep(gathered)
    return {name: made[id(value)] for name, value in state.items() if id(value) in made}


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    found = getattr(torch, given.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={given!r}: expected a name such as 'bfloat16', 'float16' or 'float32'.")
    return found
