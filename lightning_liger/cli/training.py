"""``lightning-liger fit --config FILE``: LightningCLI for files that name our strategies, callback and nothing else of us.

A plain LightningCLI script knows ``strategy: liger_fsdp`` once something has imported this package, which a
``callbacks:`` entry of ours does. Here nothing needs to.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_liger.cli.errors import CommandError
from lightning_liger.cli.places import located
from lightning_liger.trees import installed_trees


def cli_main(
    model_class: Any = None, datamodule_class: Any = None, *, args: Sequence[str] | None = None, **options: Any
) -> Any:
    """Run a LightningCLI in which the strategies and callbacks of this package are known by their names.

    A :class:`lightning_liger.LigerCallback` with default settings joins the Trainer if the configuration has none.

    Args:
        model_class: LightningModule class, of ``lightning`` or ``pytorch_lightning``; None leaves it to the command
            line or file: ``model: {class_path: ...}``.
        datamodule_class: LightningDataModule class, or None.
        args: the command line without the program's name, such as ``["fit", "--config", "sft.yaml"]``; ``sys.argv`` if
            left out.
        options: anything else that ``LightningCLI`` takes.

    Returns:
        The LightningCLI, after it has run, with its ``trainer``, ``model`` and ``datamodule``.

    Raises:
        CommandError: jsonargparse is missing. SystemExit: a configuration that is wrong, after a message that names the
            place in the file.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    classes = [c for c in (model_class, datamodule_class) if inspect.isclass(c)] or _named_classes(arguments)
    own_line = arguments == sys.argv[1:]  # LightningCLI warns of arguments beside those of the process
    return _cli_class(_tree_of(classes))(model_class, datamodule_class, args=None if own_line else arguments, **options)


def main(argv: list[str]) -> int:
    """The subcommand that ``argv`` begins with: ``fit``, ``validate``, ``test`` or ``predict``. The exit code."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # classes of the user's files, as `python -m` would find them
    cli_main(args=argv, parser_kwargs={"prog": "lightning-liger"})
    return 0


@functools.cache
def _cli_class(tree: str) -> Any:
    """A LightningCLI for one of the two trees."""
    try:
        importlib.import_module("jsonargparse")
        base: Any = importlib.import_module(f"{tree}.cli").LightningCLI
    except ImportError as error:
        raise CommandError(f"{error}. YAML files need: pip install 'lightning-liger[cli]'", code=1) from error
    # classes that exist are known by their names alone: --trainer.callbacks+=LigerCallback
    from lightning_liger.callback import LigerCallback
    from lightning_liger.strategy import strategy_class

    strategy_class(tree)

    class LigerCLI(base):
        def instantiate_classes(self) -> None:
            try:
                super().instantiate_classes()
            except (TypeError, ValueError) as error:
                message = located(error, self.config.get(str(self.subcommand), self.config).as_dict())
                if message is None:
                    raise
                self.parser.error(message)

        def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Any:
            given = config.get("callbacks") or []
            given = [*given] if isinstance(given, list) else [given]
            if not any(isinstance(callback, LigerCallback) for callback in [*given, *callbacks]):
                given.insert(0, LigerCallback())
            return super()._instantiate_trainer({**config, "callbacks": given}, callbacks)

    return LigerCLI


def _tree_of(classes: list[type]) -> str:
    trees = [tree.__name__ for tree in installed_trees()]
    for kind in classes:
        for tree in trees:
            if any(base.__module__.startswith(f"{tree}.") for base in kind.__mro__):
                return tree
    return trees[0]


def _named_classes(arguments: list[str]) -> list[type]:
    """The model's and datamodule's classes, if the command line or a file on it names them by their import path.

    What cannot be read or imported is left for the parser to complain of.
    """
    found = []
    for path in _class_paths(arguments):
        module, _, name = path.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name, None) if module else None
        except ImportError:
            continue
        if inspect.isclass(kind):
            found.append(kind)
    return found


def _class_paths(arguments: list[str]) -> Iterator[str]:
    for option, value in _options(arguments):
        if option in ("--model", "--data", "--model.class_path", "--data.class_path"):
            yield value
        elif option in ("--config", "-c"):
            for key in ("model", "data"):
                section = _file(value).get(key)
                if isinstance(section, dict) and isinstance(section.get("class_path"), str):
                    yield section["class_path"]


def _options(arguments: list[str]) -> Iterator[tuple[str, str]]:
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, equals, value = argument.partition("=")
        yield option, value if equals else following


def _file(path: str) -> dict[str, Any]:
    yaml: ModuleType = importlib.import_module("yaml")
    try:
        read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return read if isinstance(read, dict) else {}
