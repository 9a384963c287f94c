"""What FSDP2 keeps to itself, in one place.

The public interface neither says whether a group is gathered, nor which dtypes it computes in, nor lets anybody begin
the first forward, which fixes the root, by hand. Checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def sharded_parts(module: nn.Module) -> Iterator[FSDPModule]:
    """Every submodule that ``fully_shard`` was called on, ``module`` included."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            yield part


def parameters_of(part: FSDPModule) -> list[Any]:
    """The ``FSDPParam``s of one call of ``fully_shard``: ``sharded_param``, ``_unsharded_param``, ``_module_info``."""
    return [parameter for group in _groups(part) for parameter in group.fsdp_params]


def is_gathered(part: FSDPModule) -> bool:
    """Whether the module holds whole parameters now; also for one that has none."""
    return all(group.is_unsharded for group in _groups(part))


def compute_dtypes(part: FSDPModule) -> set[torch.dtype]:
    """In which dtypes the parameters of ``part`` take part in a step."""
    chosen = policy(part).param_dtype
    return {chosen or p.sharded_param.dtype for p in parameters_of(part)}


def policy(part: FSDPModule) -> Any:
    """Its ``MixedPrecisionPolicy``."""
    return _state(part)._mp_policy


def begin_as_root(part: FSDPModule) -> None:
    """Make ``part`` the root of all that it holds, as its first forward does. Nothing happens if it has run one."""
    _state(part)._lazy_init()


def finish_backward(part: FSDPModule) -> None:
    """Called in a backward: reduce the gradients of every group of the root ``part`` when it is over."""
    _state(part)._register_root_post_backward_final_callback()


def stay_gathered(part: FSDPModule) -> Callable[[], None]:
    """Keep ``part`` whole after its forward passes from now on; what is returned takes that back.

    ``set_reshard_after_forward`` does the first half, but says nothing about what was set before.
    """
    before = [(group, group.post_forward_mesh_info) for group in _groups(part)]

    def restore() -> None:
        for group, info in before:
            group.post_forward_mesh_info = info

    for group, _ in before:
        group.post_forward_mesh_info = None
    return restore


def noted_passes(parts: Iterable[FSDPModule]) -> Callable[[], None]:
    """What is returned makes FSDP forget the forward passes that ran since.

    It notes their order, with or without gradients, and prefetches by it in the next backward: ranks that ran passes of
    their own would gather in different orders, and thousands of decoding steps would fill memory.
    """
    groups = [group for part in parts for group in _groups(part)]
    orders = {id(g.comm_ctx.post_forward_order): g.comm_ctx.post_forward_order for g in groups}
    lists = [*orders.values(), *(g._post_forward_indices for g in groups)]
    lengths = [len(entries) for entries in lists]

    def forget() -> None:
        for entries, length in zip(lists, lengths, strict=True):
            del entries[length:]

    return forget


def whole_and_shard(parameter: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's piece of a gathered parameter, and the shard that it was gathered from, in the first one's dtype."""
    shard = parameter._sharded_local_tensor.detach()
    whole = parameter._unsharded_param.detach()
    dimension, info = parameter.fsdp_placement.dim, parameter.mesh_info
    pieces = torch.chunk(whole, info.shard_mesh_size, dim=dimension)
    piece = pieces[info.shard_mesh_rank] if info.shard_mesh_rank < len(pieces) else whole.narrow(dimension, 0, 0)
    return piece, shard.to(piece.device, piece.dtype).reshape(piece.shape)


def _state(part: FSDPModule) -> Any:
    return part._get_fsdp_state()


def _groups(part: FSDPModule) -> list[Any]:
    state = _state(part)
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    only = state._fsdp_param_group  # torch < 2.12
    return [] if only is None else [only]


def forget_iteration(root: FSDPModule) -> None:
    """Let every group hold its shards and expect a first forward, whatever an exception has left it in the middle of."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for part in sharded_parts(root):  # type: ignore[arg-type]
        for parameter in parameters_of(part):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:  # torch < 2.13
        _forget_iteration(root)
    for part in sharded_parts(root):  # type: ignore[arg-type]
        part.reshard()


def _forget_iteration(root: FSDPModule) -> None:
    top = _state(root)
    top._comm_ctx.post_forward_order.clear()
    for name in ("all_gather_state", "reduce_scatter_state"):
        setattr(top._comm_ctx, name, None)
    for part in sharded_parts(root):  # type: ignore[arg-type]
        _state(part)._training_state = TrainingState.IDLE
        for group in _groups(part):
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            for name in ("_all_gather_result", "_post_reduce_event", "_reshard_after_forward_event"):
                setattr(group, name, None)
            group._partial_reduce_output = group._all_reduce_state = None
    top._state_ctx.iter_forward_root = None
    top._state_ctx.post_backward_final_callback_queued = False


def reduce_unused(part: Any) -> None:
    """Count parameters without a gradient as zeros, so that ranks that used different ones reduce the same list."""
    if hasattr(part, "set_reduce_scatter_unused_params"):
        part.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in _groups(part):  # torch < 2.13
        _fill_before_reducing(group, group.post_backward)


def _fill_before_reducing(group: Any, post_backward: Callable[..., None]) -> None:
    def filled(*unused: Any) -> None:
        if group.reduce_grads and group.is_unsharded:
            for parameter in group.fsdp_params:
                whole = parameter._unsharded_param
                if whole.requires_grad and whole.grad is None and parameter.unsharded_accumulated_grad is None:
                    whole.grad = torch.zeros_like(whole)
        post_backward(*unused)

    group.post_backward = filled


def dissolve(part: FSDPModule) -> None:
    """Take ``fully_shard`` back: class, hooks and state. Its parameters must have been replaced by plain ones before."""
    module: Any = part
    state = _state(part)
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in _groups(part):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]
    for handle in handles:
        handle.remove()
    module.__class__ = type(module).__mro__[2]  # [FSDP<class>, FSDPModule, class, ...]
    _module_state_mapping.pop(module, None)
    applied = module.__dict__.get(STATE_KEY, {})
    for function in [f for f, kept in applied.items() if kept is state]:
        del applied[function]
    module.__dict__.get(REGISTRY_KEY, {}).pop("fully_shard", None)
    for inner in module.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            inner.__dict__.pop(mark, None)


def put_gradients_aside(parts: Iterable[FSDPModule]) -> Callable[[], None]:
    """Let backward passes begin without the gradients that are there, and reduce their own; undone by what is returned.

    Gradients that were accumulated and not reduced yet are held elsewhere than those that were.
    """
    undo: list[Callable[[], None]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for part in parts:
        for group in _groups(part):
            for name, value in (("reduce_grads", True), ("all_reduce_grads", True), ("_partial_reduce_output", None)):
                replace(group, name, value)
        for parameter in parameters_of(part):
            replace(parameter, "unsharded_accumulated_grad", None)
            replace(parameter.sharded_param, "grad", None)
            if hasattr(parameter, "_unsharded_param"):
                replace(parameter._unsharded_param, "grad", None)

    def restore() -> None:
        for step in undo:
            step()

    return restore
