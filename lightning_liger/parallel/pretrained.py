"""Values from the checkpoint that a transformers model's configuration names."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.parallel.initialize import _is_pretrained, _plain_class, tensors_of

# what PEFT puts around a layer that it adapts, or trains a copy of under a name
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


class Unloadable(ValueError):
    """The checkpoint that the code names cannot be read, or does not fit."""


def pretrained_models(module: nn.Module, wanted: Collection[str]) -> dict[str, Any]:
    """path -> outermost transformers model that holds one of the tensors ``wanted``."""
    found: dict[str, Any] = {}
    for path, inner in module.named_modules():
        if not _is_pretrained(inner) or any(path.startswith(f"{outer}.") or outer == "" for outer in found):
            continue
        if any(name.startswith(f"{path}." if path else "") for name in wanted):
            found[path] = inner
    return found


def named_checkpoint(model: Any) -> str:
    """The directory or repository that the model's configuration came from; empty for one that was written by hand."""
    return str(getattr(model.config, "_name_or_path", "") or "")


def checkpoint_values(model: Any, source: str, wanted: Collection[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors of ``model`` as ``from_pretrained`` loads them, renamed and merged as the architecture needs it.

    One copy in host memory, in the checkpoint's own dtype, on the rank that calls this.

    Args:
        model: the transformers model that is to be filled; adapters and resized layers may have been added since.
        source: directory or repository.
        wanted: paths inside ``model``.

    Returns:
        path -> tensor for those of ``wanted`` that the checkpoint has or that its loading computes; and the names that
        it lacks, which are left out.

    Raises:
        Unloadable: no weights there, or weights of other shapes.
    """
    kind: Any = _plain_class(model)
    try:
        with torch.random.fork_rng(devices=[]):
            loaded, info = kind.from_pretrained(
                source,
                config=type(model.config).from_dict(model.config.to_dict()),
                dtype="auto",
                output_loading_info=True,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise Unloadable(
            f"{kind.__name__} was built on the meta device from the configuration of {source!r}, whose weights could not "
            f"be loaded ({_first_line(error)}). Make them available there, name others with "
            "LigerFSDPStrategy(weights='path/or/repository'), or start from the model's own initialisation with "
            "weights='init'."
        ) from error
    missing = {str(name) for name in info["missing_keys"]}
    held = {path: tensor for path, _, _, tensor in tensors_of(loaded)}
    shapes = {path: tensor.shape for path, _, _, tensor in tensors_of(model)}
    values = {}
    for path in wanted:
        name = _WRAPPERS.sub("", path)
        if name not in held or name in missing:
            continue
        if held[name].shape != shapes[path]:
            raise Unloadable(
                f"{path} is {tuple(shapes[path])} in the model and {tuple(held[name].shape)} in {source!r}. Build the "
                "model as it was saved and resize it afterwards, or start from weights='init'."
            )
        values[path] = held[name].detach()
    return values, sorted(missing & set(wanted))


def built_values(module: nn.Module, wanted: Collection[str]) -> dict[str, Tensor]:
    """Values from a second, complete build of the transformers models that hold them, on the CPU.

    For the few architectures whose constructors write what their initialisers pass over. One more copy in host memory.
    """
    values: dict[str, Tensor] = {}
    for path, model in pretrained_models(module, wanted).items():
        prefix = f"{path}." if path else ""
        built = _plain_class(model)._from_config(copy.deepcopy(model.config))  # type: ignore[attr-defined]
        held = {name: tensor.detach() for name, _, _, tensor in tensors_of(built)}
        for name in wanted:
            inside = _WRAPPERS.sub("", name.removeprefix(prefix))
            if name.startswith(prefix) and inside in held:
                values[name] = held[inside]
    return values


def disown_uninitialised(module: nn.Module) -> None:
    """Put on ``meta`` what a transformers model allocated past ``torch.device("meta")`` and has never written to.

    Legacy constructors such as ``torch.FloatTensor(2, 3)`` do not know the device context, under which transformers
    skips its initialisation.
    """
    for model in pretrained_models(
        module, [p for p, _, _, t in tensors_of(module) if t.device.type == "meta"]
    ).values():
        for _, owner, name, tensor in list(tensors_of(model)):
            own = type(owner).__module__.startswith("transformers.")
            written = any(getattr(holder, "_is_hf_initialized", False) for holder in (owner, tensor))
            if own and not written and type(tensor) is nn.Parameter and tensor.device.type != "meta":
                owner._parameters[name] = nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
