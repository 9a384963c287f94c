"""Every attention backend, what it can do, and why it cannot be used here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_liger.padding.backends import flash, flex
from lightning_liger.padding.backends.features import OTHER_VALUES, Features
from lightning_liger.padding.layout import Layout

Run = Callable[[Tensor, Tensor, Tensor, Layout, Features, "Tensor | None"], Tensor]
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Backend:
    """One way to compute attention inside each document.

    Attributes:
        name: value of the ``attention`` option.
        title: what it is, for people.
        run: query, key, value ``(1, heads, T, size)`` to ``(T, heads, size)``; None for the model's own attention
            function, called once per document, which can do whatever that function can do.
        module, attribute, install: what it is imported from, and how to get it.
        capabilities: major CUDA compute capabilities it has kernels for; empty: any device.
        dtypes: empty: any.
        head_size, head_multiple: largest head size, and what it must be a multiple of.
        can: what it can do beyond plain causal attention, in the words of :meth:`Features.asked`.
        rule: what else it cannot do, said in words; ``""`` if nothing stands in the way.
    """

    name: str
    title: str
    run: Run | None
    module: str = ""
    attribute: str = ""
    install: str = ""
    capabilities: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    head_size: int = 0
    head_multiple: int = 1
    can: frozenset[str] = frozenset()
    rule: Callable[[Features], str] = lambda features: ""

    def unavailable(self) -> str:
        """Why this machine cannot run it at all, or ``""``; looked at once."""
        return _unavailable(self)

    def cannot(self, features: Features) -> str:
        """Why it cannot compute this layer, or ``""``."""
        if self.run is None:
            return ""
        if self.capabilities and features.device != "cuda":
            return f"it needs a CUDA device, and the tensors are on {features.device}"
        if self.capabilities and features.capability[0] not in self.capabilities:
            have = ".".join(map(str, features.capability))
            return f"it has no kernels for compute capability {have}"
        if self.dtypes and features.dtype not in self.dtypes:
            return f"it computes in {' or '.join(map(short, self.dtypes))}, not in {short(features.dtype)}"
        wrong = self.wrong_size(features.head_size) or self.wrong_size(features.value_size)
        return wrong or self.lacks(features.asked()) or self.rule(features)

    def wrong_size(self, size: int) -> str:
        """Why it has no kernel for heads of this size, or ``""``."""
        if self.run is None or (size <= self.head_size and size % self.head_multiple == 0):
            return ""
        return f"its head sizes are multiples of {self.head_multiple} up to {self.head_size}, not {size}"

    def lacks(self, asked: frozenset[str]) -> str:
        """Which of the things asked for it cannot do, in words, or ``""``."""
        missing = sorted(asked - self.can)
        return f"it has no {' and no '.join(missing)}" if missing and self.run is not None else ""


@functools.cache
def _unavailable(backend: Backend) -> str:
    if backend.capabilities and not torch.cuda.is_available():
        return "it needs a CUDA device"
    if backend.module:
        try:
            found: Any = importlib.import_module(backend.module)
            if not hasattr(found, backend.attribute):
                return "it is not installed"  # flash-attn-4 alone makes a package flash_attn without version 2 in it
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            own = backend.module.startswith(error.name or "-")
            return "it is not installed" if own else f"it needs the package {missing}, which is not installed"
        except Exception as error:  # a package built for another torch or CUDA fails in many ways on import
            return f"it cannot be imported ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    return ""


def short(dtype: torch.dtype) -> str:
    return {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(str(dtype)[6:], str(dtype)[6:])


def _flash_2_rule(features: Features) -> str:
    return "it has no soft-capped scores together with dropout" if features.softcap and features.dropout else ""


def _flash_4_rule(features: Features) -> str:
    major, size, value = features.capability[0], features.head_size, features.value_size
    if major in (10, 11) and max(size, value) > 128 and (size, value) not in ((192, 128), (256, 256)):
        return f"its head sizes on Blackwell are up to 128, 192 with values of 128, and 256, not {size}"
    if major in (10, 11) and (size, value) == (256, 256) and (features.softcap or features.sinks):
        return "it has no soft-capped scores and no attention sinks for heads of 256 on Blackwell"
    if major == 12 and (features.softcap or features.sinks):
        return "it has no backward for soft-capped scores and attention sinks on compute capability 12"
    return ""


_BOTH_WAYS = frozenset({"sliding windows", "attention in both directions"})
_CAPPED = _BOTH_WAYS | {"soft-capped scores"}
_SINKS = _CAPPED | {"attention sinks", OTHER_VALUES}

BACKENDS: tuple[Backend, ...] = (
    Backend(
        "fa4", "FlashAttention 4", flash.flash_4, "flash_attn.cute", "flash_attn_varlen_func",
        "pip install 'lightning-liger[fa4]'", (9, 10, 11, 12), HALF, 256, 8, _SINKS, _flash_4_rule,
    ),
    Backend(
        "fa3", "FlashAttention 3", flash.flash_3, "flash_attn_interface", "flash_attn_varlen_func",
        "build it from the hopper/ folder of https://github.com/Dao-AILab/flash-attention", (9,), HALF, 256, 8, _CAPPED,
    ),
    Backend(
        "fa2", "FlashAttention 2", flash.flash_2, "flash_attn", "flash_attn_varlen_func",
        "pip install flash-attn --no-build-isolation", (8, 9, 10, 11, 12), HALF, 256, 8,
        _CAPPED | {"attention dropout"}, _flash_2_rule,
    ),
    Backend(
        "varlen", "FlashAttention 2 inside torch", flash.torch_varlen, "torch.nn.attention.varlen", "varlen_attn",
        "install torch 2.11 or newer", (8, 9, 10, 11, 12), HALF, 256, 8, _BOTH_WAYS,
    ),
    Backend(
        "flex", "compiled FlexAttention", flex.flex, "triton", "jit", "pip install triton", (7, 8, 9, 10, 11, 12),
        (*HALF, torch.float32), 256, 1, _SINKS,
    ),
    Backend("sdpa", "the model's own attention, once per document", None),
)  # fmt: skip
NAMES = tuple(backend.name for backend in BACKENDS)


def by_name(name: str) -> Backend:
    return next(backend for backend in BACKENDS if backend.name == name)
