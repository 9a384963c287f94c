"""Models and modules named on a command line, built without memory for their weights where that is possible."""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from lightning_liger.cli.errors import CommandError
from lightning_liger.cli.targets import is_named, load


def make(target: str, arguments: dict[str, Any], trust_remote_code: bool) -> tuple[nn.Module, list[str]]:
    """The module, and notes about how it was made.

    Raises:
        CommandError: there is nothing of that name, or it cannot be built.
    """
    path = Path(target).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".json"):
        return _checkpoint(path, trust_remote_code), []
    if is_named(target):
        return _object(target, load(target, "TARGET"), arguments)
    return _model_type(target, arguments), []


def described(module: nn.Module) -> dict[str, Any]:
    """Its class and size; parameters that two modules share count once."""
    outermost: list[nn.Module] = []
    for part in module.modules():
        if (
            hasattr(part, "config")
            and hasattr(part, "base_model")
            and not any(part in set(o.modules()) for o in outermost)
        ):
            outermost.append(part)
    return {
        "class": type(module).__name__,
        "models": sorted(type(m).__name__ for m in outermost),
        "parameters": sum(p.numel() for p in module.parameters()),
        "trained": sum(p.numel() for p in module.parameters() if p.requires_grad),
    }


def _checkpoint(path: Path, trust_remote_code: bool) -> nn.Module:
    import transformers

    folder = path if path.is_dir() else path.parent
    if path.is_dir() and not (path / "config.json").is_file():
        raise CommandError(f"TARGET {path}: the directory has no config.json, so it is no checkpoint of transformers.")
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise CommandError(f"TARGET {path}: {' '.join(str(error).split())[:300]}", code=1) from error
    if trust_remote_code and getattr(config, "auto_map", None):
        config.name_or_path = str(folder)
    return _on_meta(config, trust_remote_code, str(path))


def _model_type(name: str, arguments: dict[str, Any]) -> nn.Module:
    from transformers import CONFIG_MAPPING

    types = sorted(CONFIG_MAPPING.keys())
    if name not in types:
        near = difflib.get_close_matches(name, types, n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise CommandError(
            f"TARGET {name}: neither a directory, nor file.py:name, nor a model type of transformers.{hint} Checkpoints of "
            "the Hub are not downloaded: give a local directory."
        )
    try:
        config = CONFIG_MAPPING[name](**arguments)
    except Exception as error:  # configurations check their values in many ways
        raise CommandError(f"TARGET {name}: {_short(error)}", code=1) from error
    return _on_meta(config, False, name)


def _on_meta(config: Any, trust_remote_code: bool, name: str) -> nn.Module:
    import transformers

    makers = [getattr(transformers, n, None) for n in getattr(config, "architectures", None) or []]
    autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModel)
    first = ""
    with torch.device("meta"):
        for maker in (m for m in makers if m is not None):
            try:
                return maker(config).train()
            except Exception as error:  # any architecture's own code
                first = first or _short(error)
        for auto in autos:
            try:
                return auto.from_config(config, trust_remote_code=trust_remote_code).train()
            except Exception as error:  # the same, or the type has no such model
                first = first or _short(error)
    raise CommandError(f"TARGET {name}: no model could be built of its configuration: {first}", code=1)


def _object(target: str, found: Any, arguments: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    if isinstance(found, nn.Module):
        return found, []
    if not callable(found):
        raise CommandError(f"TARGET {target}: expected a module, or something that makes one, found {found!r}.")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise CommandError(f"TARGET {target}: {error}. Give its arguments: --args '{{\"name\": value}}'.") from error
    except ValueError:
        pass  # no signature to look at
    notes: list[str] = []
    try:
        with torch.device("meta"):
            made = _called(found, arguments)
    except Exception:  # weights that are loaded or computed with need memory
        try:
            made = _called(found, arguments)
        except Exception as error:  # the user's code
            raise CommandError(f"TARGET {target}: making it failed: {_short(error)}", code=1) from error
        notes.append("The module was built with its weights: it does not build without memory for them")
    if not isinstance(made, nn.Module):
        raise CommandError(f"TARGET {target}: expected it to make a module, and it made a {type(made).__name__}.")
    return made, notes + _configured(made)


def _called(found: Any, arguments: dict[str, Any]) -> Any:
    made = found(**arguments)
    made = made[0] if isinstance(made, tuple) and made else made
    return getattr(made, "module", made) if type(made).__name__ == "Job" else made


def _configured(module: Any) -> list[str]:
    """Models that a LightningModule makes when a Trainer asks for them."""
    configure = getattr(type(module), "configure_model", None)
    if configure is None or str(getattr(configure, "__module__", "")).startswith(("lightning.", "pytorch_lightning.")):
        return []
    try:
        with torch.device("meta"):
            module.configure_model()
    except Exception as error:  # it may want a Trainer, or weights
        return [f"configure_model() did not run without a Trainer ({_short(error)}): what it makes is not looked at"]
    return []


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
