"""Layers that look their attention up in the interface of transformers, and what they find there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn as nn

from lightning_liger.padding.backends.errors import PackingError


def uses_attention_interface(module: nn.Module) -> bool:
    """Whether the module is a layer that looks its attention function up in the transformers interface."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel) or not hasattr(module, "config"):
        return False
    return any("ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names for function in _own_functions(module))


def _own_functions(module: nn.Module) -> Iterator[Any]:
    """The undecorated methods of the module's class and its bases, below ``nn.Module``."""
    for klass in type(module).__mro__:
        if klass is nn.Module:
            return
        for name, member in vars(klass).items():
            if not name.startswith("__") and inspect.isfunction(member):
                yield inspect.unwrap(member)


def original_function(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function of this name; ``"eager"`` is the one beside the layer's own code.

    Raises:
        PackingError: there is none.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if implementation != "eager":
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[implementation]
        return function
    for method in _own_functions(module):
        if (found := method.__globals__.get("eager_attention_forward")) is not None:
            return found
    raise PackingError(f"{type(module).__name__} has no eager attention function to run per document")
