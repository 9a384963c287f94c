"""Strategy names in the registries of both Lightning trees, without importing either of them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

# name -> options of LigerFSDPStrategy
NAMES: dict[str, dict[str, Any]] = {
    "liger_fsdp": {},
    "liger_fsdp_offload": {"offload": True},
    "liger_hsdp": {"replicate_size": "nodes"},
}
_DESCRIPTIONS = {
    "liger_fsdp": "FSDP2 for any LightningModule: fp32 master weights, bf16 compute",
    "liger_fsdp_offload": "liger_fsdp with parameters and optimizer state in host memory",
    "liger_hsdp": "liger_fsdp within each node, replicated over nodes",
}
# package whose import makes the registry -> the tree it belongs to
_REGISTRIES = {"lightning.pytorch.strategies": "lightning.pytorch", "pytorch_lightning.strategies": "pytorch_lightning"}


def register_strategies() -> None:
    """Register now where Lightning is imported already, and as soon as it is where it is not."""
    missing = False
    for package, tree in _REGISTRIES.items():
        if package in sys.modules:
            _register(sys.modules[package], tree)
        else:
            missing = True
    if missing and not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register(strategies: ModuleType, tree: str) -> None:
    registry = strategies.StrategyRegistry
    for name, options in NAMES.items():
        # override: the package may be imported a second time under test runners and notebooks
        registry.register(name, partial(_make, tree), _DESCRIPTIONS[name], override=True, **options)


def _make(tree: str, **options: Any) -> Any:
    from lightning_liger.strategy import strategy_class

    return strategy_class(tree)(**options)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing by itself; lets the ordinary finders find Lightning's registry and registers once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = _then_register(spec.loader.exec_module, _REGISTRIES[fullname])
                return spec
        return None


def _then_register(exec_module: Callable[[ModuleType], None], tree: str) -> Callable[[ModuleType], None]:
    def run(module: ModuleType) -> None:
        exec_module(module)
        _register(module, tree)

    return run
