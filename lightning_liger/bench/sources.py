"""Build functions that name a script or a configuration, so that another process can call them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from lightning_liger.bench.job import TRAINER_OPTIONS, Job, NoJob

# Of a subcommand of LightningCLI, beside what it is made of.
_OF_SUBCOMMANDS = ("ckpt_path", "weights_only", "verbose", "return_predictions", "config")
_CALLBACK = "LigerCallback"


@dataclass(frozen=True)
class Script:
    """``path/to/file.py:build`` or ``package.module:build``."""

    target: str

    def __call__(self) -> Any:
        from lightning_liger.cli.targets import load

        return load(self.target, "TARGET")()


@dataclass(frozen=True)
class Config:
    """A configuration file of a LightningCLI; ``model`` and ``data`` name their classes."""

    path: str

    def __call__(self) -> Job:
        import yaml

        with open(self.path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
        if not isinstance(content, dict):
            raise NoJob(f"{self.path} is no configuration of a LightningCLI: it holds no keys.")
        if "model" not in content and isinstance(content.get("fit"), dict):
            content = content["fit"]
        for key in ("model", "data"):
            if key in content and "class_path" not in (content[key] or {}):
                raise NoJob(
                    f"{self.path}: `{key}:` names no class. Write `{key}: {{class_path: package.module.Class, init_args: "
                    "{...}}`, or give a script.py:build instead."
                )
        if "model" not in content:
            raise NoJob(f"{self.path} is no configuration of a LightningCLI: it has no `model:`.")
        trainer = content.get("trainer") or {}
        kept = {k: v for k, v in trainer.items() if k in TRAINER_OPTIONS and v is not None}
        made = {
            k: v for k, v in content.items() if k not in _OF_SUBCOMMANDS and k not in ("trainer", "seed_everything")
        }
        cli = _cli(content["model"]["class_path"])(
            args={**made, "trainer": {**kept, "logger": False, "enable_progress_bar": False}, "seed_everything": False},
            run=False,
            save_config_callback=None,
            subclass_mode_model=True,
            subclass_mode_data=True,
        )
        return Job(cli.model, cli.datamodule, kept, _options(trainer.get("callbacks") or []))


def _cli(class_path: str) -> Any:
    """The ``LightningCLI`` of the tree that the class belongs to."""
    package, _, name = class_path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise NoJob(f"model: class_path {class_path!r} cannot be imported: {error}") from error
    try:
        if any(base.__module__.startswith("pytorch_lightning.") for base in kind.__mro__):
            return importlib.import_module("pytorch_lightning.cli").LightningCLI
        return importlib.import_module("lightning.pytorch.cli").LightningCLI
    except ImportError as error:
        raise NoJob(f"a configuration needs jsonargparse: pip install 'lightning-liger[cli]' ({error})") from error


def _options(callbacks: Any) -> dict[str, Any]:
    """Options of a LigerCallback among the callbacks of the configuration."""
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if isinstance(callback, dict) and str(callback.get("class_path", "")).rpartition(".")[2] == _CALLBACK:
            return dict(callback.get("init_args") or {})
    return {}
