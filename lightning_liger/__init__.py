"""Accelerate an unmodified LightningModule: no padding, no stored logits, the same loss."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_liger.accelerate import Accelerated, accelerate
from lightning_liger.registration import register_strategies
from lightning_liger.settings import Settings

if TYPE_CHECKING:
    from lightning_liger.callback import LigerCallback
    from lightning_liger.cli.training import cli_main
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
    "cli_main",
    "grad_norm",
]

register_strategies()


# Imported when one is asked for: accelerate() alone works without Lightning.
_LAZY = {
    "LigerCallback": "lightning_liger.callback",
    "LigerFSDPStrategy": "lightning_liger.strategy",
    "LigerFSDPStrategyPL": "lightning_liger.strategy",
    "cli_main": "lightning_liger.cli.training",
    "grad_norm": "lightning_liger.parallel.clipping",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
