"""Hugging Face models inside of a LightningModule: which there are, and how to write one with its config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

KEY = "huggingface"  # where a checkpoint keeps descriptions


def find_models(module: nn.Module) -> dict[str, nn.Module]:
    """Path -> ``PreTrainedModel`` or ``PeftModel``; of nested ones the outermost."""
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        if is_model(part) and not any(path.startswith(f"{outer}." if outer else "") for outer in found):
            found[path] = part
    return found


def is_model(part: nn.Module) -> bool:
    """Whether ``part`` is a ``transformers`` or ``peft`` model."""
    return is_peft(part) or any(kind.__name__ == "PreTrainedModel" for kind in type(part).__mro__)


def is_peft(part: nn.Module) -> bool:
    """Whether ``part`` is a ``PeftModel``."""
    return any(kind.__name__ == "PeftModel" for kind in type(part).__mro__)


def choose(models: Mapping[str, Any], path: str | None, trains: Mapping[str, bool]) -> str:
    """The path of the model to export: the one named, the only one, or the only one that trains.

    Raises:
        ValueError: there is none, or several could be meant.
    """
    if path is not None:
        if path not in models:
            raise ValueError(f"model={path!r} is no Hugging Face model of this module. There are: {_listed(models)}.")
        return path
    candidates = [p for p in models if trains.get(p)] or list(models)
    if not candidates:
        raise ValueError("There is no Hugging Face model in this module, so there is no config to export it with.")
    if len(candidates) > 1:
        raise ValueError(f"Which model is to be exported? Pass model=..., one of {_listed(candidates)}.")
    return candidates[0]


def _listed(paths: Any) -> str:
    return ", ".join(repr(p) for p in paths) or "none"


def describe(module: nn.Module) -> dict[str, dict[str, Any]]:
    """What a checkpoint needs to hold so that it can be exported without the user's code: configs, as plain values."""
    described = {}
    for path, model in find_models(module).items():
        base: Any = model.get_base_model() if is_peft(model) else model  # type: ignore[operator]
        entry: dict[str, Any] = {
            # fully_shard puts a prefix before the class
            "class": type(base).__name__.removeprefix("FSDP"),
            "config": json.loads(base.config.to_json_string(use_diff=False)),
            "trains": any(p.requires_grad for p in model.parameters()),
        }
        if base.can_generate() and base.generation_config is not None:
            entry["generation_config"] = json.loads(base.generation_config.to_json_string(use_diff=False))
        if is_peft(model):
            configs: Any = model.peft_config
            entry["adapters"] = {name: _plain(config.to_dict()) for name, config in configs.items()}
        described[path] = entry
    return described


def rebuild(description: Mapping[str, Any]) -> Any:
    """The model of a description on the ``meta`` device: names, ties and config, no weights.

    Raises:
        ValueError: its class is not one of ``transformers``.
    """
    import transformers

    kind = getattr(transformers, description["class"], None)
    if kind is None:
        raise ValueError(
            f"{description['class']} is no class of transformers {transformers.__version__}: the checkpoint is of a model"
            " with code of its own. Export with the module at hand: --module package.module:LightningModuleClass."
        )
    values = dict(description["config"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = kind(config)
        if "generation_config" in description:
            model.generation_config = transformers.GenerationConfig.from_dict(dict(description["generation_config"]))
        if "adapters" in description:
            model = _with_adapters(model, description["adapters"])
    return model


def _with_adapters(model: Any, adapters: Mapping[str, Mapping[str, Any]]) -> Any:
    import peft

    made = None
    for name, values in adapters.items():
        config = peft.PeftConfig.from_peft_type(**values)
        if made is None:
            made = peft.get_peft_model(model, config, adapter_name=name)
        else:
            made.add_adapter(name, config)
    return made


def needed_names(model: Any, state: Mapping[str, Any]) -> list[str]:
    """The names in ``state`` that :func:`write` uses: all of a model's, the adapters' of a PEFT model."""
    if not is_peft(model):
        return list(state)
    import peft

    chosen: set[int] = set()
    for adapter in model.peft_config:
        chosen |= {
            id(v) for v in peft.get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter).values()
        }
    if not chosen <= {id(value) for value in state.values()}:
        return list(state)  # made of other tensors: leave the choice to the writing
    return [name for name, value in state.items() if id(value) in chosen]  # of tied ones all names


def write(model: Any, state: dict[str, Tensor], out: Path, tokenizer: Any = None, max_shard_size: str = "5GB") -> None:
    """Write safetensors with config, for ``from_pretrained``; of a PEFT model its adapters alone.

    Args:
        model: Gives class, config and ties; its own weights are not read.
        state: Whole CPU tensors by the model's own names, of one or several dtypes.
        out: Directory, made if missing.
        tokenizer: Saved beside, if given.
        max_shard_size: Of one file of weights.
    """
    tie(model, state)
    out.mkdir(parents=True, exist_ok=True)
    dtype = next((t.dtype for t in state.values() if t.is_floating_point()), None)
    if is_peft(model):
        model.save_pretrained(out, state_dict=state, safe_serialization=True)
    else:
        model.save_pretrained(out, state_dict=state, max_shard_size=max_shard_size)
        config = json.loads((out / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")  # the file's, not that of the model in memory
        (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(out)


def tie(model: nn.Module, state: dict[str, Any]) -> None:
    """Give names of one parameter one tensor, as ``save_pretrained`` expects to see ties."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            state[name] = state[first.setdefault(id(parameter), name)]


def find_tokenizer(*owners: Any) -> Any:
    """A tokenizer or processor that is an attribute of one of ``owners``, or ``None``."""
    kinds = ("ProcessorMixin", "PreTrainedTokenizerBase")
    for kind in kinds:
        for owner in owners:
            for value in vars(owner).values() if owner is not None else ():
                if any(k.__name__ == kind for k in type(value).__mro__):
                    return value
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Enum):
        return value.value
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
