"""One forward, and the backward of the last block, on the ``meta`` device, with every byte counted that they hold."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_liger.parallel.initialize import meta_twin
from lightning_liger.parallel.recompute import is_product
from lightning_liger.parallel.selecting import Product
from lightning_liger.parallel.stand_ins import counted_attention, kernel_shapes
from lightning_liger.patching import Rebound
from lightning_liger.tiling.binding import TiledMLP, chunk_size
from lightning_liger.tiling.chunks import in_chunks


class Run(TorchDispatchMode):
    """What was counted.

    Attributes:
        saved: bytes of distinct memory that autograd keeps. entry: of the hidden states that a block takes.
        each: ``saved`` within each block. attention: bytes that attention gave in all blocks.
        products: of the last block, those whose results a second run of it has to compute.
        backward: the most that the last block's backward holds beyond what was there before.
    """

    counts_products = True  # so that chunks hide theirs, as they do from checkpoints

    def __init__(self) -> None:
        super().__init__()
        self.saved = self.entry = self.attention = self.backward = 0
        self.each: list[int] = []
        self.products: list[Product] = []
        self._inside = False
        self._found: list[Product] = []
        self._kept: dict[int, Tensor] = {}
        self._last: tuple[nn.Module | None, Tensor | None] = (None, None)
        self._live: dict[int, Any] | None = None
        self._bytes = 0

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, blocks: Sequence[nn.Module], ids: Tensor, attends: Any) -> Tensor:
        """Run ``model``; keys of memory are only good while what they name lives, so that all of it is held."""
        self._kept = {_key(t): t for t in (*model.parameters(), *model.buffers())}
        own = set(self._kept)
        handles = [h for block in blocks for h in self._watch(block)]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        with torch.enable_grad(), attends, self, hooks:
            output: Any = model(input_ids=ids, use_cache=False)
        for handle in handles:
            handle.remove()
        self._kept = {key: t for key, t in self._kept.items() if key in own}
        return output[0]

    def attended(self, *outputs: Tensor) -> None:
        self.attention += sum(t.nbytes for t in outputs)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = _key(tensor)
        if key not in self._kept:
            self._kept[key] = tensor
            self.saved += tensor.untyped_storage().nbytes()
            if self._inside:
                self.products = list(self._found)  # what comes after the last one that is kept is not computed again
        return tensor

    def _watch(self, block: nn.Module) -> tuple[Any, Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            self.entry = 0 if hidden is None else hidden.nbytes
            self._before, self._inside, self._found = self.saved, True, []
            self._last = (module, hidden)

        def leave(*_: Any) -> None:
            self.each.append(self.saved - self._before)
            self._inside = False

        return block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward_of_last_block(self, output: Tensor) -> None:
        """From the gradient of the output to that of the last block's entry, with the gradients of its parameters."""
        block, entry = self._last
        if block is None or entry is None or not output.requires_grad:
            return
        wanted: list[Tensor] = [p for p in block.parameters() if p.requires_grad]
        wanted += [entry] if entry.requires_grad else []
        self._kept, self._live, self._bytes, self._last = {}, {}, 0, (None, None)
        with self:
            found = torch.autograd.grad(output, wanted, torch.empty_like(output), allow_unused=True)
        del found
        self._live = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype).item()  # a question about values, which there are none of
        if self._live is not None:
            self._see(args, made=False)
        result = func(*args, **(kwargs or {}))
        if self._live is not None:
            self._see(result, made=True)
        elif self._inside and is_product(func):
            left = args[1] if func is torch.ops.aten.addmm.default else args[0]
            self._found.append(Product(len(self._found), result.nbytes, int(left.shape[-1])))
        return result

    def _see(self, tree: Any, *, made: bool) -> None:
        """Count memory from when it was made; what was there before counts negatively once it is gone."""
        assert self._live is not None
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live:
                continue
            size = storage.nbytes()

            def gone(_: Any, key: int = key, size: int = size) -> None:
                if self._live is not None and self._live.pop(key, None) is not None:
                    self._bytes -= size

            self._live[key] = weakref.ref(storage, gone)
            if made:
                self._bytes += size
                self.backward = max(self.backward, self._bytes)


def run_on_meta(
    backbone: Any, blocks: Sequence[nn.Module], shape: tuple[int, int], dtype: torch.dtype | None, recomputed: bool
) -> Run:
    """Count for a call of ``backbone`` with ids of ``shape``, with parameters in ``dtype`` (None for their own).

    Args:
        recomputed: blocks are fully checkpointed, which decides whether their MLPs run in chunks.
    """
    twin: Any
    twin, counterparts = meta_twin(backbone)
    for module in twin.modules():
        for name, bound in [(n, v) for n, v in vars(module).items() if isinstance(v, Rebound)]:
            del vars(module)[name]
            if name != "forward":
                continue
            if (kernel := kernel_shapes(bound, module)) is not None:
                vars(module)[name] = kernel
            if (chunk := _chunk_of(bound, shape, recomputed)) > 0:
                vars(module)[name] = partial(in_chunks, module.forward, module, chunk=chunk)
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
        for name, p in module._parameters.items():
            if p is not None and dtype is not None and p.is_floating_point():
                module._parameters[name] = nn.Parameter(p.detach().to(dtype), p.requires_grad)
    run = Run()
    ids = torch.zeros(shape, dtype=torch.long, device="meta")
    # a padded batch of a model that attends eagerly keeps its scores
    own = shape[0] > 1 and getattr(backbone.config, "_attn_implementation", "") == "eager"
    attends = nullcontext() if own else counted_attention(backbone.config, run.attended)
    output = run.forward(twin, [counterparts[id(block)] for block in blocks], ids, attends)
    run.backward_of_last_block(output)
    return run


def _chunk_of(bound: Rebound | None, shape: tuple[int, int], recomputed: bool) -> int:
    """Tokens that an MLP computes at a time; 0 for all."""
    while isinstance(bound, Rebound):
        if isinstance(bound, TiledMLP):
            return chunk_size(bound.choice, shape[0] * shape[1], recomputed=recomputed)
        bound = bound.previous  # type: ignore[assignment]
    return 0


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
