"""Where in a configuration file the option is that an error speaks of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# "attention='fa9': expected one of ...", alone or as one line of what jsonargparse makes of it
_OPTION = re.compile(r"^\s*(?:- )?((\w+)=\S.*)$", re.MULTILINE)
_MENTIONED = re.compile(r"\b(\w+)='?[\w{]")


def located(error: BaseException, config: Any) -> str | None:
    """The message of ``error`` behind the place of the option that it speaks of, or None if there is no such place.

    Args:
        config: what was parsed, of mappings and lists.
    """
    text = str(error)
    for message, name in [*_OPTION.findall(text), *((text, name) for name in _MENTIONED.findall(text))]:
        found = [path for path in _paths(config) if re.split(r"[.\]]", path)[-1] == name]
        if found:
            return f"{' or '.join(found)}: {message}"
    return None


def _paths(tree: Any, path: str = "") -> Iterator[str]:
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from _paths(item, f"{path}[{index}]")
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            below = f"{path}.{key}" if path else str(key)
            yield below
            yield from _paths(item, below)
