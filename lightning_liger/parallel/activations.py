"""What autograd keeps for backward, counted without computing anything.

The decoder stack runs once on the ``meta`` device, where tensors have shapes and no memory, and what its operators save
for backward is added up. That holds for any architecture, and for adapters and frozen parts. Where a model does not run
on ``meta``, or is none of transformers', its linear layers are added up instead, in the manner of Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_liger.kernels.mlps import GatedMLPBinding
from lightning_liger.kernels.norms import NormBinding
from lightning_liger.kernels.registry import KernelBinding
from lightning_liger.parallel.initialize import meta_twin
from lightning_liger.parallel.recompute import is_product
from lightning_liger.patching import Rebound

_NAME = "liger_counted"


@dataclass(frozen=True)
class Activations:
    """Bytes on one device for one micro-batch.

    Attributes:
        blocks: how many blocks keep something.
        block: what one block keeps for backward without checkpointing.
        entry: hidden states at a block's entry.
        kept: what selective checkpointing keeps of a block besides its entry.
        outside: what is kept outside of the blocks, without the head and the loss.
        counted: False for an estimate from the linear layers alone.
    """

    blocks: int = 0
    block: int = 0
    entry: int = 0
    kept: int = 0
    outside: int = 0
    counted: bool = True

    def total(self, mode: str) -> int:
        """The most that is held at a time, when backward begins; one block is whole while it is computed again."""
        if mode == "none":
            return self.blocks * self.block + self.outside
        each = self.entry if mode == "full" else self.entry + self.kept
        return self.blocks * each + min(self.block, self.blocks * self.block) + self.outside

    def scaled(self, factor: float) -> Activations:
        block, entry, kept, outside = (round(n * factor) for n in (self.block, self.entry, self.kept, self.outside))
        return Activations(self.blocks, block, entry, kept, outside, self.counted)


def count_activations(
    backbone: Any, blocks: Sequence[nn.Module], shape: tuple[int, int], dtype: torch.dtype | None
) -> Activations:
    """Count for a call of ``backbone`` with token ids of ``shape``.

    Attention is counted as fused kernels keep it: queries, keys, values, output, one fp32 number for each row and head;
    for padded batches of models that attend eagerly, as it is. Triton kernels of norms and gated MLPs that are bound to
    the model's layers are counted as what they keep; those of other layers as the layers they replace.

    Args:
        backbone: a transformers model without head, sharded or not.
        blocks: its blocks, those that are checkpointed.
        shape: ``(1, T)`` for packed calls, ``(B, S)`` for padded ones.
        dtype: what parameters take part in; None for what they are stored in.
    """
    try:
        return _run(backbone, blocks, shape, dtype)
    except Exception:
        # whatever a model's forward may raise on meta: data-dependent control flow, kernels without meta implementation
        return from_linear_layers(blocks, shape[0] * shape[1], dtype)


def from_linear_layers(blocks: Sequence[nn.Module], tokens: int, dtype: torch.dtype | None) -> Activations:
    """Each linear layer keeps its input, and its output is kept by what follows it; both for every token.

    A lower estimate: norms, activation functions in several steps, and scores keep more.
    """
    size = (dtype or torch.float32).itemsize
    shapes: list[list[tuple[int, int]]] = [
        [_shape(m) for m in block.modules() if _multiplies(m) and any(p.requires_grad for p in m.parameters())]
        for block in blocks
    ]
    active = [each for each in shapes if each]
    if not active:
        return Activations(counted=False)
    scale = tokens * size
    width = sum(sum(map(sum, each)) for each in active) // len(active)
    kept = sum(sum(s[0] for s in each[::2]) for each in active) // len(active)
    return Activations(len(active), width * scale, active[0][0][1] * scale, kept * scale, 0, counted=False)


def _shape(module: Any) -> tuple[int, int]:
    return module.weight.shape[0], module.weight.shape[1]


def _multiplies(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _run(backbone: Any, blocks: Sequence[nn.Module], shape: tuple[int, int], dtype: torch.dtype | None) -> Activations:
    twin: Any
    twin, counterparts = meta_twin(backbone)
    for module in twin.modules():
        for name, bound in [(n, v) for n, v in vars(module).items() if isinstance(v, Rebound)]:
            del vars(module)[name]
            if name == "forward" and (kernel := _kernel_shapes(bound, module)) is not None:
                vars(module)[name] = kernel
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
        for name, p in module._parameters.items():
            if p is not None and dtype is not None and p.is_floating_point():
                module._parameters[name] = nn.Parameter(p.detach().to(dtype), p.requires_grad)
    count = _Count(twin)
    for block in blocks:
        count.watch(counterparts[id(block)])
    ids = torch.zeros(shape, dtype=torch.long, device="meta")
    hooks = torch.autograd.graph.saved_tensors_hooks(count.pack, lambda tensor: tensor)
    # a padded batch of a model that attends eagerly keeps its scores
    own = shape[0] > 1 and getattr(backbone.config, "_attn_implementation", "") == "eager"
    with torch.enable_grad(), nullcontext() if own else _counted_attention(backbone.config, count), count, hooks:
        twin(input_ids=ids, use_cache=False)
    active = [n for n in count.each if n > 0]
    mean = sum(active) // max(len(active), 1)
    outside = max(count.bytes - sum(count.each), 0)
    return Activations(len(active), mean, count.entry, count.kept // max(len(count.each), 1), outside)


class _Count(TorchDispatchMode):
    """Bytes of distinct memory that is saved, in all and in each block; and of what selective checkpointing keeps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.bytes = self.kept = self.entry = 0
        self.each: list[int] = []
        self._inside = False
        self._products = 0
        self._alive: dict[int, Any] = {_key(t): t for t in (*model.parameters(), *model.buffers())}

    def pack(self, tensor: Tensor) -> Tensor:
        key = _key(tensor)
        if key not in self._alive:
            self._alive[key] = tensor  # keys are only good while what they name lives
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor

    def watch(self, block: nn.Module) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            self.entry = 0 if hidden is None else hidden.nbytes
            self._before, self._inside, self._products = self.bytes, True, 0

        def leave(*_: Any) -> None:
            self.each.append(self.bytes - self._before)
            self._inside = False

        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave)

    def attended(self, *outputs: Tensor) -> None:
        self.kept += sum(t.nbytes for t in outputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype).item()  # a question about values, which there are none of
        result = func(*args, **(kwargs or {}))
        if self._inside and is_product(func):
            self._products += 1
            self.kept += result.nbytes * (self._products % 2)
        return result


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Kept(torch.autograd.Function):
    """A kernel that gives a tensor like the first one it keeps."""

    @staticmethod
    def forward(ctx: Any, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        return torch.empty_like(kept[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError


def _kernel_shapes(bound: Any, twin: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """What stands for a module's Triton kernel: norms keep their input, gated MLPs gate and up."""
    while isinstance(bound, Rebound) and not isinstance(bound, KernelBinding):
        bound = bound.previous
    if isinstance(bound, NormBinding):
        return lambda x: _Kept.apply(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
    if not isinstance(bound, GatedMLPBinding):
        return None
    layers: Any = twin._modules
    spec = bound.spec

    def gated(x: Tensor) -> Tensor:
        if spec.gate == spec.up:
            both = layers[spec.gate](x)
            gate, up = (t.contiguous() for t in both.chunk(2, dim=-1))
        else:
            gate, up = layers[spec.gate](x), layers[spec.up](x)
        return layers[spec.down](_Kept.apply(gate, up))

    return gated


class _Attention(torch.autograd.Function):
    """The shapes of a fused attention kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, count: _Count) -> Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1])
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        count.attended(output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError


@contextmanager
def _counted_attention(config: Any, count: _Count) -> Iterator[None]:
    from transformers.modeling_utils import AttentionInterface

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
        return _Attention.apply(query, key, value, count), None

    mapping = AttentionInterface._global_mapping
    before = config._attn_implementation_internal
    mapping[_NAME] = attention
    config._attn_implementation_internal = _NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        mapping.pop(_NAME, None)
