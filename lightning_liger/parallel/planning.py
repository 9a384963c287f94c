"""Reading what :mod:`lightning_liger.parallel.memory_plan` needs from a sharded module, its optimizers and a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_liger.device_memory import free_bytes as cuda_free_bytes
from lightning_liger.head.chunks import row_chunks
from lightning_liger.head.finding import find_heads
from lightning_liger.mirrored import cpu_values
from lightning_liger.padding.backbones import find_backbones
from lightning_liger.parallel.activations import Activations, count_activations, from_linear_layers, sum_of
from lightning_liger.parallel.divisible import larger_sizes
from lightning_liger.parallel.gathering import host_bytes
from lightning_liger.parallel.groups import parameters_of, policy, sharded_parts
from lightning_liger.parallel.memory_plan import MemoryPlan, State
from lightning_liger.parallel.optimizer_sizes import optimizer_bytes
from lightning_liger.parallel.shard import Sharding

_FIXED_IDS = ("input_ids", "ids", "tokens", "inputs", "x")


@dataclass(frozen=True)
class Batch:
    """What is known of one batch: its padded shape, how many positions are tokens, and how many labels count."""

    shape: tuple[int, int] = (0, 0)
    tokens: int = 0
    labelled: int = 0

    def slice_of(self, ranks: int) -> Batch:
        """What one of ``ranks`` that share the batch has of it."""
        return replace(self, tokens=-(-self.tokens // ranks), labelled=-(-self.labelled // ranks))


def read_batch(batch: Any) -> Batch:
    """Find the ``(B, S)`` token ids, mask and labels of a batch; all positions count where there is no mask."""
    named = batch if isinstance(batch, Mapping) else {}
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim() == 2 and not t.is_floating_point()]
    ids = next((named[n] for n in _FIXED_IDS if isinstance(named.get(n), Tensor) and named[n].dim() == 2), None)
    ids = ids if ids is not None else max(tensors, key=lambda t: t.numel(), default=None)
    if ids is None:
        return Batch()
    shape = (ids.shape[0], ids.shape[1])
    mask, labels = named.get("attention_mask"), named.get("labels")
    tokens = _count(mask, 0) if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.numel()
    labelled = _count(labels, -100) if isinstance(labels, Tensor) and labels.shape == ids.shape else tokens
    return Batch(shape, tokens, labelled)


def _count(tensor: Tensor, without: int) -> int:
    values = cpu_values(tensor)
    return int(((tensor if values is None else values) != without).sum())


def plan_memory(
    module: nn.Module,
    sharding: Sharding,
    optimizers: Sequence[Any],
    batch: Any,
    device: torch.device,
    *,
    packed: bool,
    fused_head: bool,
    checkpointing: str = "none",
    offload: bool = False,
    keeps_blocks: bool = False,
    prefetch: int = 0,
    accumulates: bool = False,
    frees_gradients: bool = True,
    offloads_activations: bool = False,
    ranks: int = 1,
    slices: int = 1,
) -> MemoryPlan:
    """The plan for training ``module`` on batches such as ``batch``.

    Args:
        packed: padding is removed. fused_head: the head is computed together with the loss.
        accumulates: gradients of earlier micro-batches are there when a later one runs.
        frees_gradients: those of the step before are gone when its successor begins.
        offloads_activations: what blocks keep is moved to host memory.
        ranks: over how many ranks each parameter is spread.
        slices: among how many ranks the tokens of a packed batch are divided.
        See :class:`State` and :class:`MemoryPlan` for the rest.
    """
    seen = read_batch(batch)
    seen = seen.slice_of(slices) if packed else seen
    state = read_state(module, sharding, optimizers, offload=offload, prefetch=prefetch, ranks=ranks, keep=keeps_blocks)
    dtype = next((policy(part).param_dtype for part in sharded_parts(module)), None)
    head, head_kept = read_head(module, seen, dtype, device, fused=fused_head)
    return MemoryPlan(
        state=state,
        activations=read_activations(module, sharding, seen, dtype, packed=packed, recomputed=checkpointing == "full"),
        head=head,
        head_kept=head_kept,
        tokens=seen.tokens if packed else seen.shape[0] * seen.shape[1],
        capacity=capacity_of(device),
        checkpointing=checkpointing,
        accumulates=accumulates,
        frees_gradients=frees_gradients,
        slices=slices,
        offloads=offloads_activations if device.type == "cuda" else None,
        divisible=larger_sizes(module, slices, ranks) if packed else (),
    )


def capacity_of(device: torch.device) -> int:
    """Bytes that this process may have on ``device``: what it has and what nobody has."""
    if device.type != "cuda":
        return host_bytes()
    return cuda_free_bytes(device) + torch.cuda.memory_allocated(device)


def read_state(
    module: nn.Module,
    sharding: Sharding,
    optimizers: Sequence[Any],
    *,
    offload: bool,
    prefetch: int,
    ranks: int,
    keep: bool,
) -> State:
    """Bytes of shards, gradients, optimizer state and gathered groups on this rank."""
    local = [(p, (p.to_local() if isinstance(p, DTensor) else p).nbytes) for p in module.parameters()]
    optimizer, temporaries, _ = optimizer_bytes(optimizers)
    blocks: set[Any] = set(sharding.blocks.values())
    whole: dict[bool, list[int]] = {True: [], False: []}
    root_gradients = reduced = block_reduced = accumulated = 0
    for part in sharded_parts(module):
        chosen, size, to_reduce = policy(part), 0, 0
        is_block = part in blocks
        for parameter in parameters_of(part):
            dtype = chosen.param_dtype or parameter.sharded_param.dtype
            numel = parameter._orig_size.numel()
            size += numel * dtype.itemsize
            if parameter.sharded_param.requires_grad:
                to_reduce += numel * (chosen.reduce_dtype or dtype).itemsize
                root_gradients += 0 if is_block else numel * dtype.itemsize
        accumulated += to_reduce
        if is_block:
            block_reduced = max(block_reduced, to_reduce)
        else:
            reduced += to_reduce
        whole[is_block].append(size)
    return State(
        parameters=sum(size for _, size in local),
        gradients=sum(size for p, size in local if p.requires_grad),
        optimizer=optimizer,
        root=sum(whole[False]),
        block=max(whole[True], default=0),
        blocks=sum(whole[True]),
        root_gradients=root_gradients,
        reduced=reduced,
        block_reduced=block_reduced,
        accumulated=accumulated,
        temporaries=temporaries,
        in_flight=1 + max(prefetch, 1),
        ranks=ranks,
        offload=offload,
        keeps_blocks=keep,
    )


def read_activations(
    module: nn.Module,
    sharding: Sharding,
    batch: Batch,
    dtype: torch.dtype | None,
    *,
    packed: bool,
    recomputed: bool,
) -> Activations:
    """Of every backbone that trains; of the blocks alone where there is none of transformers'."""
    if not batch.tokens:
        return Activations(counted=False)
    suited, refused = find_backbones(module)
    backbones = [m for m in (*suited, *refused) if any(p.requires_grad for p in m.parameters())]
    shape = (1, batch.tokens) if packed else batch.shape
    found = []
    for backbone in backbones:
        inside = set(backbone.modules())
        blocks = [block for block in sharding.blocks.values() if block in inside]
        found.append(count_activations(backbone, blocks, shape, dtype, recomputed))
    if not found:
        return from_linear_layers(list(sharding.blocks.values()), shape[0] * shape[1], dtype)
    return sum_of(found)


def read_head(
    module: nn.Module, batch: Batch, dtype: torch.dtype | None, device: torch.device, *, fused: bool
) -> tuple[int, int]:
    """Bytes of logits that exist at a time with the gradients made of them; and what of it waits for backward.

    A head that is not fused keeps logits, their fp32 copy and log-probabilities, and gets a gradient of the copy.
    """
    heads = [h for h in find_heads(module, None)[0] if any(p.requires_grad for p in module.parameters())]
    largest = kept = 0
    for head in heads:
        weight: Any = head.weight
        vocab, width = weight.shape
        size = (dtype or weight.dtype).itemsize
        if not fused:
            logits = batch.shape[0] * batch.shape[1] * vocab * (size + 12)
            largest, kept = max(largest, logits), max(kept, logits)
            continue
        gradient = vocab * width * size if weight.requires_grad else 0
        rows = 2 * batch.labelled * width * size  # of the labelled tokens, and their gradients
        chunk, sums = _chunk(batch.labelled, vocab, width, size, device)
        sums = sums if gradient else 0
        largest = max(largest, rows + max(chunk + (sums or gradient), sums + gradient))
        kept = max(kept, gradient + rows)
    return largest, kept


def _chunk(labelled: int, vocab: int, width: int, size: int, device: torch.device) -> tuple[int, int]:
    """Bytes of one chunk of logits; and of fp32 sums over chunks, where there are several."""
    in_place = device.type == "cuda"
    spared = vocab * width * (4 - size) if in_place else 0
    entry = size if in_place else 4
    parts = row_chunks(labelled, vocab, device, entry, in_place=in_place, spared=spared)
    longest = max((part.stop - part.start for part in parts), default=0)
    return longest * vocab * (size if in_place else 12), 0 if len(parts) == 1 and in_place else vocab * width * 4
