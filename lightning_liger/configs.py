"""Values of model configurations, where they have one."""

from __future__ import annotations

from typing import Any


def config_value(config: Any, name: str) -> Any:
    """``config.<name>``; None if there is no such value, or none for all layers.

    Configurations of models whose layers differ raise a ``RuntimeError`` for what varies (transformers 5.24).
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None
