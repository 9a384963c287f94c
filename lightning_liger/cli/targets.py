"""Python objects named on a command line: ``path/to/file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_liger.cli.errors import CommandError


def is_named(text: str) -> bool:
    """Whether ``text`` has the form ``module:attribute`` or ``file.py:attribute``; a drive letter is no module."""
    where, colon, attribute = text.rpartition(":")
    return bool(colon and len(where) > 1 and attribute.replace(".", "").isidentifier())


def load(text: str, option: str) -> Any:
    """The object that ``text`` names; its module is imported as ``python file.py`` or ``python -m module`` would find it.

    Args:
        option: how the command line calls this, for messages.

    Raises:
        CommandError: there is no such file, module or attribute, or importing it fails.
    """
    if not is_named(text):
        raise CommandError(f"{option} {text}: expected path/to/file.py:name or package.module:name.")
    where, _, path = text.rpartition(":")
    found: Any = _module(where, text, option)
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise CommandError(f"{option} {text}: {where} has no {part!r}.{hint}")
        found = getattr(found, part)
    return found


def _module(where: str, text: str, option: str) -> ModuleType:
    if where.endswith(".py"):
        return _file(Path(where), text, option)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # an installed command does not begin in the current directory
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(f"{error.name}.")):
            raise CommandError(f"{option} {text}: importing {where} failed: {error}", code=1) from error
        remedy = f"For a file, write its path: {option} path/to/{where.rpartition('.')[2]}.py:name."
        raise CommandError(f"{option} {text}: no module {where!r} is installed or in {Path.cwd()}. {remedy}") from error
    except Exception as error:  # the module's own code
        raise CommandError(f"{option} {text}: importing {where} failed: {_short(error)}", code=1) from error


def _file(path: Path, text: str, option: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise CommandError(f"{option} {text}: there is no file {path}.")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # a script finds what lies beside it
    # under its own name: classes that are pickled for worker processes are found again by it
    name = path.stem if known is None else f"_lightning_liger_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file's own code
        del sys.modules[name]
        raise CommandError(f"{option} {text}: running {path.name} failed: {_short(error)}", code=1) from error
    return module


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
