"""Copies of functions that see other values for some of their globals; the function itself stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any


def with_globals(function: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of ``function`` to which the globals in ``values`` are these; decorators (``__wrapped__``) are copied along.

    Raises:
        ValueError: a decorator that does not hold the function in a closure.
    """
    if not isinstance(function, FunctionType):
        raise ValueError(f"{function!r} is not a plain function")
    inner = getattr(function, "__wrapped__", None)
    globals_, closure = function.__globals__, function.__closure__
    if inner is None:
        globals_ = {**globals_, **values}
    else:
        cells = list(closure or ())
        at = [i for i, cell in enumerate(cells) if _content(cell) is inner]
        if not at:
            raise ValueError("forward is wrapped by a decorator that cannot be copied")
        copied = CellType(with_globals(inner, values))
        closure = tuple(copied if i in at else cell for i, cell in enumerate(cells))
    made = FunctionType(function.__code__, globals_, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
