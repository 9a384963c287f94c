"""What the padded run would have given, for whoever looks: padded positions, and the KV cache.

Neither is computed by a packed call. Both are made by running the original call once, when they are first read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_liger.modes import Modes
from lightning_liger.padding.backends.errors import PackingError
from lightning_liger.padding.layout import Layout, LayoutBook
from lightning_liger.padding.padding_free import written_parameters
from lightning_liger.patching import bypass
from lightning_liger.report import PaddingReport


class Packed(Protocol):
    """What runs without its padding: a backbone or a decoder."""

    module: Any
    report: PaddingReport
    book: LayoutBook

    @property
    def original(self) -> Callable[..., Any]: ...

    def is_sharded(self) -> bool: ...

    def leave_padded(self, reason: str, *, training: bool) -> None: ...


class PlainRun:
    """The padded run of one packed call: the ``PlainSource`` of its lazy hidden states."""

    def __init__(self, backbone: Packed, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> None:
        self.backbone = backbone
        # ids and masks are small and often written to afterwards; embeddings are large, and part of a graph
        self._args, self._kwargs = tree_map_only(Tensor, _kept, (args, kwargs))
        self._inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        self._versions = self._now()
        # adapters are often switched within a step, such as off for a reference
        self._modes = Modes(backbone.module, len(self._versions))
        self._layout = layout
        self._with_gradients = torch.is_grad_enabled()
        self._outputs: dict[bool, Any] = {}
        self._packed: dict[tuple[Any, ...], Tensor] = {}

    def returned(self, path: tuple[Any, ...], rows: Tensor) -> None:
        """The packed run has returned ``rows`` of shape ``(T, H)`` at ``path`` of its output."""
        if self.backbone.book.reads.noted is not None:
            self._packed[path] = rows

    def output(self) -> Any:
        """The whole output; the run is made once per call (and once more for gradients)."""
        graph = torch.is_grad_enabled()
        found = self._outputs.get(True, self._outputs.get(graph))
        if found is None:
            if self._now() != self._versions:
                raise PackingError(
                    "padded positions of an earlier call, or its KV cache, are read after the weights or inputs were "
                    "written to (by an optimizer step, perhaps). Padding removal did not compute them then and cannot "
                    "now: read them before, or set padding_free=False."
                )
            with bypass("a padded position was read"), self._modes.restored():
                found = self._outputs[graph] = self.backbone.original(*self._args, **self._kwargs)
            self.backbone.report.ran_twice()
        return found

    def _now(self) -> list[int]:
        """How often each parameter, and each floating input, was written to."""
        written = (*written_parameters(self.backbone.module), *self._inputs)
        return [0 if t.is_inference() else t._version for t in written]

    def value(self, path: tuple[Any, ...]) -> Tensor:
        """The output at ``path``; zeros for padding in a step that counts for nothing."""
        if (standing_in := self.stand_in(path)) is not None:
            return standing_in
        found = self.output()
        for step in path:
            found = found[step]
        return found

    def stand_in(self, path: tuple[Any, ...]) -> Tensor | None:
        """What the packed run has returned at ``path`` in a step that counts for nothing, with zeros for padding."""
        if path not in self._packed or not self.backbone.book.reads.noted:
            return None
        index = self._layout.on(self._packed[path].device).index
        # where ranks share the rows, others' stand in for those of this one: no number of such a step counts
        rows = index.clamp_min(0) % len(self._packed[path])
        return self._packed[path][rows].masked_fill((index < 0)[..., None], 0)

    def cache(self, name: str) -> Any:
        """The KV cache that the padded run leaves behind under ``name``; later calls like this one run padded."""
        if self.backbone.is_sharded():
            raise self._cannot_run_again("the KV cache")
        self.backbone.leave_padded("the KV cache is used", training=self._with_gradients)
        with torch.set_grad_enabled(self._with_gradients):
            return getattr(self.output(), name)

    def scored(self, what: str) -> None:
        if self.backbone.is_sharded():
            if self._is_noted(what):
                return
            raise self._cannot_run_again(what)
        self.backbone.leave_padded(f"{what} reads padded positions", training=self._with_gradients)

    def read(self, path: tuple[Any, ...], what: str, differentiable: bool) -> Tensor | None:
        if self.backbone.is_sharded():
            self._is_noted(what)
            return None
        if differentiable or not self._with_gradients:
            # Whether a later batch's loss depends on what is read there cannot be known, and packed and padded runs
            # together cost more than the padded one alone.
            self.backbone.leave_padded(f"{what} reads padded positions", training=self._with_gradients)
        return self.value(path)

    def watch(self, what: str) -> Callable[[Tensor], None] | None:
        """A hook on ``(B, S, ·)`` values that were read with zeros at padded positions."""
        if not self.backbone.is_sharded():
            return None  # the reader was given the padded run's values

        def check(grad: Tensor) -> None:
            pads = self._layout.on(grad.device).index < 0
            if bool((grad[pads] != 0).any()):
                raise self._cannot_run_again(what)

        return check

    def _is_noted(self, what: str) -> bool:
        return self.backbone.book.reads.note(self.backbone, what, self._with_gradients)

    def _cannot_run_again(self, what: str) -> PackingError:
        return PackingError(
            f"{what} reads padded positions, whose values padding removal does not compute, and a sharded model "
            "cannot be run again on one rank. Set padding_free=False."
        )


def _kept(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() else tensor.clone()


# How code that walks through a model's output (Accelerate, Fabric) tells a tensor or a named tuple from anything else.
_ASKED_OF_OUTPUTS = ("dtype", "device", "requires_grad", "_fields", "_asdict")


@functools.cache
def _deferred_type(kind: type) -> type:
    def __init__(self: Any, plain: PlainRun, name: str) -> None:
        object.__setattr__(self, "_liger_made", (plain, name))

    def __getattribute__(self: Any, name: str) -> Any:
        if name in _ASKED_OF_OUTPUTS and not hasattr(kind, name):
            raise AttributeError(name)
        if name == "__dict__" or not name.startswith("__"):  # what the class knows says nothing of the values
            made = object.__getattribute__(self, "__dict__").pop("_liger_made", None)
            if made is not None:
                cache = made[0].cache(made[1])
                object.__setattr__(self, "__class__", type(cache))
                object.__getattribute__(self, "__dict__").update(vars(cache))
        return object.__getattribute__(self, name)

    members = {"__init__": __init__, "__getattribute__": __getattribute__, "__module__": __name__}
    return type(f"Deferred{kind.__name__}", (kind,), members)


def deferred_cache(kind: type, plain: PlainRun, name: str) -> Any:
    """A KV cache of class ``kind`` that becomes the padded run's own when any of its attributes is touched."""
    return _deferred_type(kind)(plain, name)
