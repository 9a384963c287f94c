"""Sharding one module, in place: the blocks first, then the module itself as the root of all that is left."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_liger.parallel.blocks import chooses_submodules
from lightning_liger.parallel.entry import Entry, watch_entries
from lightning_liger.parallel.groups import dissolve, forget_iteration, parameters_of, reduce_unused, sharded_parts
from lightning_liger.parallel.reducing import reduce_into_compute_memory

_RECORD = "_liger_sharding"  # on the module itself: it goes when the module goes
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass
class Sharding:
    """What :func:`shard` did.

    Attributes:
        blocks: path -> block that is a group of its own.
        found: paths of groups that the user's code had made before.
        whole: parameters that no group manages: each rank holds all of them, and their gradients must be averaged.
        entry: gathers the root's group for whoever comes in past its forward.
        options: what a second Trainer must agree with.
    """

    blocks: dict[str, nn.Module] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    whole: dict[str, nn.Parameter] = field(default_factory=dict)
    entry: Entry | None = None
    options: tuple[MixedPrecisionPolicy, bool] | None = None


def shard(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    *,
    root_policy: MixedPrecisionPolicy,
    block_policy: MixedPrecisionPolicy,
    prepare: Callable[[nn.Module], None],
    reshard_after_forward: bool = True,
    offload: bool = False,
) -> Sharding:
    """``fully_shard`` each block, then ``module`` as the root, so that every parameter is managed. A collective.

    A parameter that no group holds would be trained by each rank on its own data alone, and silently diverge. The root
    is not resharded after its forward: a loss may read the head's weight later, and backward begins there anyway.

    What the user's code sharded is left alone.

    Args:
        module: the LightningModule, or any module that is called first.
        blocks: path -> submodule to gather and free by itself; from :func:`lightning_liger.parallel.blocks.find_blocks`.
        mesh: one dimension to shard over, or two, of which the first replicates.
        device: where parameters live while they take part in a step.
        root_policy: dtypes of the root's group. block_policy: dtypes of each block.
        prepare: called on each part of the module before its group is made, with what no earlier group holds; casts,
            initialises or broadcasts its parameters.
        reshard_after_forward: free a block's parameters between forward and backward.
        offload: keep shards, gradients and with them the optimizer's state in host memory.
    """
    found = [name for name, m in module.named_modules() if isinstance(m, FSDPModule)]
    whole = {n: p for n, p in module.named_parameters() if not can_be_sharded(p)}
    for parameter in whole.values():
        parameter.data = parameter.data.to(device)
        _broadcast(parameter.data)
    ignored = set(whole.values())
    offload_policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()

    def make_group(part: nn.Module, policy: MixedPrecisionPolicy, reshard: bool) -> None:
        prepare(part)
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=offload_policy,
            ignored_params=ignored,
        )

    for block in blocks.values():
        make_group(block, block_policy, reshard_after_forward)
        if chooses_submodules(block):
            reduce_unused(block)
    if not isinstance(module, FSDPModule):
        make_group(module, root_policy, False)
        # What the root returns is a loss; nobody writes into it, and torch's advice about views would only alarm.
        about_views = rf"FSDP2-wrapped module \({type(module).__name__}\) returned a view tensor"
        warnings.filterwarnings("ignore", message=about_views)
        reduce_into_compute_memory([*blocks.values(), module])
    else:
        reduce_into_compute_memory(blocks.values())
    for name in STEPS:
        if callable(getattr(module, name, None)):
            register_fsdp_forward_method(module, name)
    _log_whole_values(module)
    entry = watch_entries(module, _inside_groups(module), root_policy.param_dtype)
    sharding = Sharding(dict(blocks), found, whole, entry, (root_policy, offload))
    module.__dict__[_RECORD] = sharding
    return sharding


def _log_whole_values(module: Any) -> None:
    """Sums and norms of shards are shards themselves, and some releases of PyTorch read them as if they were whole."""
    log = getattr(module, "log", None)
    if log is None:
        return

    @functools.wraps(log)
    def log_whole(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        log(name, tree_map_only(DTensor, DTensor.full_tensor, value), *args, **kwargs)

    module.__dict__["log"] = log_whole


def foreign_parts(module: nn.Module) -> list[FSDPModule]:
    """What somebody else sharded inside of ``module``."""
    known: Sharding | None = module.__dict__.get(_RECORD)
    parts = {name: m for name, m in module.named_modules() if isinstance(m, FSDPModule)}
    return [m for name, m in parts.items() if known is None or name in known.found]


def already_sharded(module: nn.Module, root_policy: MixedPrecisionPolicy, offload: bool) -> Sharding | None:
    """What an earlier :func:`shard` did to ``module``, with every group sharded again; None if there was none.

    Raises:
        ValueError: it was done with other dtypes, or another place for the parameters.
    """
    known: Sharding | None = module.__dict__.get(_RECORD)
    if known is None:
        return None
    if known.options != (root_policy, offload):
        raise ValueError(
            "An earlier Trainer sharded this module with another precision= or offload=. Use the same options, or call "
            "restore_module() of that Trainer's strategy on every rank first."
        )
    assert isinstance(module, FSDPModule)
    forget_iteration(module)
    return known


def restore(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Take :func:`shard` back: whole, plain parameters on the CPU, and the module's own classes. A collective.

    Returns:
        sharded parameter -> the plain one in its place, for optimizers.
    """
    sharding: Sharding | None = module.__dict__.pop(_RECORD, None)
    if sharding is None:
        return {}
    assert sharding.entry is not None
    for handle in sharding.entry.handles:
        handle.remove()
    for name in (*STEPS, "log"):
        own: Any = module.__dict__.get(name)
        if hasattr(own, "__wrapped__"):
            del module.__dict__[name]
            if getattr(module, name) != own.__wrapped__:
                module.__dict__[name] = own.__wrapped__
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for part in (*sharding.blocks.values(), *([] if "" in sharding.found else [module])):
        assert isinstance(part, FSDPModule)
        for parameter in parameters_of(part):
            sharded, info = parameter.sharded_param, parameter._module_info
            plain = nn.Parameter(sharded.detach().full_tensor().cpu(), requires_grad=sharded.requires_grad)
            replaced[sharded] = plain
            for owner, name in (
                (info.module, info.param_name),
                *zip(info.shared_modules, info.shared_param_names, strict=True),
            ):
                owner._parameters[name] = plain
        dissolve(part)
    return replaced


def reshard(module: nn.Module) -> None:
    """Free every gathered parameter, so that the module holds what optimizers and checkpoints work on."""
    for part in sharded_parts(module):
        part.reshard()


def own_tensors(part: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers of ``part`` that no group inside of it holds, each once."""
    seen: set[int] = set()
    grouped = {
        id(m)
        for inner in part.modules()
        if inner is not part and isinstance(inner, FSDPModule)
        for m in inner.modules()
    }
    for module in part.modules():
        if id(module) in grouped:
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) not in seen and not isinstance(tensor, DTensor):
                seen.add(id(tensor))
                yield tensor


def same_on_all_ranks(part: nn.Module, device: torch.device) -> None:
    """Move what :func:`own_tensors` names to ``device`` and give every rank what rank 0 holds. A collective.

    Without a seed each rank initialises a module of its own, and its shards would be pieces of different models.
    """
    for tensor in own_tensors(part):
        if tensor.device.type != "meta":
            tensor.data = tensor.data.to(device)
            _broadcast(tensor.data)


def _broadcast(tensor: torch.Tensor) -> None:
    # as bytes: gloo and NCCL do not know every dtype, and a view of another shape may not be contiguous
    whole = tensor.contiguous()
    if whole.numel():
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
    if whole is not tensor:
        tensor.copy_(whole)


def can_be_sharded(parameter: torch.Tensor) -> bool:
    """Whether FSDP manages it; what it does not, each rank holds whole.

    A quantised weight may be stored as floats, but only the whole of it belongs to its quantisation state, which a
    sharded parameter no longer carries (``bitsandbytes.nn.Params4bit``).
    """
    if isinstance(parameter, DTensor):
        return True
    return parameter.dim() > 0 and parameter.is_floating_point() and not hasattr(parameter, "quant_state")


def _inside_groups(root: nn.Module) -> set[nn.Module]:
    inside: set[nn.Module] = set()
    for module in root.modules():
        if module is not root and isinstance(module, FSDPModule) and module not in inside:
            inside.update(module.modules())
    return inside
