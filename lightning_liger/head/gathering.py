"""A head whose weight FSDP2 gathers for the head's own forward, and gives back before the loss reads the logits.

``fully_shard`` frees a group's weights when the forward of its module is over and gathers them again when a gradient
reaches that module's output. Logits that are computed later need both moments moved: :class:`Gathering` puts the
freeing off for as long as lazy logits of the call are alive, and the hooks that FSDP2 puts on the output are passed on
to whatever reads it (:meth:`View.watch_backward`). Gradients reach the gathered weight itself, so that FSDP2 reduces
them as ever. Each forward and each backward gathers once, as in a plain run, whoever still holds logits: ranks that
keep them for different times must not differ in their collectives.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from lightning_liger.head.lazy import LazyRows, View, lazy

_KNOWN: weakref.WeakKeyDictionary[Any, Gathering] = weakref.WeakKeyDictionary()


def gathering_of(module: nn.Module) -> Gathering | None:
    """The FSDP2 group that shards ``module.weight``; None if none does."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    for group in _groups():
        if any(_holds_weight_of(module, p._module_info) for p in group.fsdp_params):
            return _KNOWN.setdefault(group, Gathering(group))
    return None


def _holds_weight_of(module: nn.Module, info: Any) -> bool:
    holders = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    return any(m is module and name == "weight" for m, name in holders)


def _groups() -> Iterator[Any]:
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        state: Any = reference()
        several = getattr(state, "_fsdp_param_groups", None)
        yield from several if several is not None else filter(None, [getattr(state, "_fsdp_param_group", None)])


class Kept(Protocol):
    """Weights that are whole for as long as somebody keeps them."""

    def keep(self) -> None: ...

    def drop(self) -> None: ...


class Hold:
    """Keeps the weights of one group gathered until it is dropped. Shared by all lazy tensors of one call."""

    def __init__(self, gathering: Kept) -> None:
        self.gathering = gathering
        gathering.keep()

    def __del__(self) -> None:
        if not vars(self):  # a tracer of compiled code makes objects without ever calling their __init__
            return
        self.gathering.drop()


class Gathering:
    """One FSDP2 parameter group that holds a head's weight, and the lazy logits that still need it."""

    def __init__(self, group: Any) -> None:
        self._group: Any = weakref.proxy(group)
        self._holds = 0
        # What FSDP would do after forward, while that is put off; a tuple, because None means "nothing".
        self._put_off: tuple[Any] | None = None
        self._handles: list[Any] = []
        self._inputs: list[dict[int | str, View]] = []

    def gathered(self, weight: Tensor) -> bool:
        """Whether ``weight`` is what this group gathered; False for one that replaced it."""
        with contextlib.suppress(ReferenceError):
            return any(getattr(p, "_unsharded_param", None) is weight for p in self._group.fsdp_params)
        return False

    def shards(self) -> list[Tensor]:
        """What an optimizer writes into when it changes the weights."""
        return [p.sharded_param._local_tensor for p in self._group.fsdp_params]

    # -- one call of the head ----------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Called in the forward that the weights were gathered for."""
        self._holds += 1
        if self._group.post_forward_mesh_info is not None:
            self._put_off = (self._group.post_forward_mesh_info,)
            self._group.post_forward_mesh_info = None

    def drop(self) -> None:
        self._holds -= 1
        if self._holds == 0:
            with contextlib.suppress(ReferenceError):  # the model is gone already
                self.give_back()

    def give_back(self, _: Any = None) -> None:
        """Free what FSDP would have freed after forward. No communication."""
        if self._put_off is None or self._state == "POST_BACKWARD":  # the next forward does it then
            return
        (self._group.post_forward_mesh_info,), self._put_off = self._put_off, None
        if self._state == "IDLE":  # in the middle of its forward or backward FSDP will do it
            self._group._to_sharded()

    def ensure(self, _: Any = None) -> None:
        """Gather for a reader that comes after the weights were given back, such as a metric after a backward."""
        group = self._group
        if group.is_unsharded:
            return
        group.unshard()
        group.wait_for_unshard()
        if self._put_off is None:
            self._put_off = (group.post_forward_mesh_info,)
            group.post_forward_mesh_info = None

    @property
    def is_alone(self) -> bool:
        """Whether the head's module is all there is in the group, so that nothing in front of it needs the weights."""
        return len({p._module_info.module for p in self._group.fsdp_params}) == 1

    @property
    def _state(self) -> str:
        return str(self._group._training_state.name)

    # -- around the module's own hooks -------------------------------------------------------------------------------

    def attach(self) -> None:
        """Stand around the hooks of FSDP2, which would compute lazy hidden states on their way in."""
        if self._handles:
            return
        for module in self._group.modules:
            before = module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            after = module.register_forward_pre_hook(self._after, with_kwargs=True)
            self._handles += (before, after)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Begin with the optimizer's weights, and show FSDP the rows: their gradient tells it when the head is done."""
        if self._state == "IDLE":
            self.give_back()
        views: dict[int | str, View] = {}
        self._inputs.append(views)

        def rows(key: int | str, value: Any) -> Any:
            if not isinstance(value, LazyRows) or not value.is_live() or not value.view_.is_hidden_rows():
                return value
            value.consume("the head")
            views[key] = value.view_
            return value.view_.source.rows

        return tuple(rows(i, a) for i, a in enumerate(args)), {k: rows(k, v) for k, v in kwargs.items()}

    def _after(self, module: Any, args: Any, kwargs: Any) -> Any:
        views = self._inputs.pop()

        def hidden(key: int | str, rows: Any) -> Any:
            if key not in views:
                return rows
            view = views[key]
            return lazy(replace(view, source=replace(view.source, rows=rows), dtype=rows.dtype))

        return tuple(hidden(i, a) for i, a in enumerate(args)), {k: hidden(k, v) for k, v in kwargs.items()}
