"""Accelerate an unmodified LightningModule: no padding, no stored logits, the same loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_liger.accelerate import Accelerated, accelerate
from lightning_liger.settings import Settings

if TYPE_CHECKING:
    from lightning_liger.callback import LigerCallback

__version__ = "0.1.0"
__all__ = ["Accelerated", "LigerCallback", "Settings", "accelerate"]


def __getattr__(name: str) -> Any:
    # Lightning is imported when the callback is asked for: accelerate() alone works without it.
    if name == "LigerCallback":
        from lightning_liger.callback import LigerCallback

        return LigerCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
