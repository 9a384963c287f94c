"""Running code as if nobody had: no random number drawn, nothing logged, no mode of the caller's in the way."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def apart() -> Iterator[None]:
    """As if nobody had asked: no random number drawn, nothing logged, and no mode of the caller's in the way."""
    chatty = logging.getLogger("transformers")
    level, dtype = chatty.level, torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        # loaders put ``Parameter`` registration and ``torch.nn.init`` under their own spell; the tiny model needs both
        stack.enter_context(_plain_construction())
        warnings.simplefilter("ignore")
        chatty.setLevel(logging.CRITICAL + 1)
        torch.set_default_dtype(torch.float32)
        try:
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every GPU, too
            yield
        finally:
            torch.set_default_dtype(dtype)
            chatty.setLevel(level)


@contextmanager
def _plain_construction() -> Iterator[None]:
    """``nn.Module.register_parameter`` as torch defines it, where ``accelerate.init_empty_weights`` has replaced it."""
    found = torch.nn.Module.register_parameter
    if found.__module__ != "torch.nn.modules.module":
        original = next((c.cell_contents for c in found.__closure__ or () if _is_torch_original(c.cell_contents)), None)
        if original is not None:
            torch.nn.Module.register_parameter = original  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = found  # type: ignore[method-assign]


def _is_torch_original(value: Any) -> bool:
    return getattr(value, "__qualname__", "") == "Module.register_parameter" and (
        getattr(value, "__module__", "") == "torch.nn.modules.module"
    )
