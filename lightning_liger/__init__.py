"""Accelerate an unmodified LightningModule: no padding, no stored logits, the same loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_liger.accelerate import Accelerated, accelerate
from lightning_liger.registration import register_strategies
from lightning_liger.settings import Settings

if TYPE_CHECKING:
    from lightning_liger.callback import LigerCallback
    from lightning_liger.parallel.clipping import grad_norm
    from lightning_liger.strategy import LigerFSDPStrategy, LigerFSDPStrategyPL

__version__ = "0.1.0"
__all__ = [
    "Accelerated",
    "LigerCallback",
    "LigerFSDPStrategy",
    "LigerFSDPStrategyPL",
    "Settings",
    "accelerate",
    "grad_norm",
]

register_strategies()


def __getattr__(name: str) -> Any:
    # Lightning is imported when one of these is asked for: accelerate() alone works without it.
    if name == "LigerCallback":
        from lightning_liger.callback import LigerCallback

        return LigerCallback
    if name in ("LigerFSDPStrategy", "LigerFSDPStrategyPL"):
        from lightning_liger import strategy

        return getattr(strategy, name)
    if name == "grad_norm":
        from lightning_liger.parallel.clipping import grad_norm

        return grad_norm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
