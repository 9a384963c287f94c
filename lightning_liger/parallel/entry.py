"""What lies outside of the blocks, entered from anywhere: the weights are there, and inputs have their dtype.

Embeddings, final norms, heads and small modules belong to the root's group. Inside a step the root has gathered it; a
callback or a hook that calls ``pl_module.model(...)`` or ``generate`` comes in without passing the root.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from lightning_liger.parallel.groups import begin_as_root, is_gathered, parameters_of


class Entry:
    """A forward pre-hook for every module outside of the blocks."""

    def __init__(self, root: FSDPModule, dtype: torch.dtype | None) -> None:
        self.root = root
        self._dtype = dtype
        self._flags: dict[int, bool] = {}
        self.handles: list[RemovableHandle] = []
        self._held: dict[nn.Module, list[Any]] = {}
        for parameter in parameters_of(root):
            info = parameter._module_info
            for owner in (info.module, *info.shared_modules):
                self._held.setdefault(owner, []).append(parameter)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return None
        self.gather()
        held = self._held.get(module)
        if held is None:
            return None
        for parameter in held:
            self._carry_flag(parameter)
        return None if self._dtype is None else (self._cast(args), self._cast(kwargs))

    def gather(self) -> None:
        """Make the root's parameters whole, if they are not. A collective."""
        begin_as_root(self.root)
        if not is_gathered(self.root):
            self.root.unshard()

    def _carry_flag(self, parameter: Any) -> None:
        """``requires_grad`` may be changed on the sharded parameter (by an optimizer) or on the whole one (by a module)."""
        sharded, whole = parameter.sharded_param, parameter._unsharded_param
        before = self._flags.get(id(parameter), sharded.requires_grad)
        if sharded.requires_grad != before:
            whole.requires_grad_(sharded.requires_grad)
        elif whole.requires_grad != before:
            sharded.requires_grad_(whole.requires_grad)
        self._flags[id(parameter)] = sharded.requires_grad

    def _cast(self, inputs: Any) -> Any:
        dtype = self._dtype

        def cast(tensor: Tensor) -> Tensor:
            # float64 is a choice of the user's; anything below fp32 was computed by the model itself
            return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor

        return tree_map_only(Tensor, cast, inputs)


def watch_entries(root: nn.Module, inside: Collection[nn.Module], dtype: torch.dtype | None) -> Entry:
    """Put an :class:`Entry` on all that is neither the root nor inside of a group of its own.

    Args:
        root: the sharded root.
        inside: every module that some other group manages.
        dtype: floating inputs of modules that hold parameters are cast to it; None leaves them.
    """
    assert isinstance(root, FSDPModule)
    entry = Entry(root, dtype)
    for module in root.modules():
        if module is not root and module not in inside and any(isinstance(p, DTensor) for p in module.parameters()):
            entry.handles.append(module.register_forward_pre_hook(entry, prepend=True, with_kwargs=True))
    return entry
