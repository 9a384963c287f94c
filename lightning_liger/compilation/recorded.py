"""Decoder blocks replayed as CUDA graphs: one launch for all kernels of a block, forward and backward.

Each block of a stack is recorded by itself, in the order in which the model calls them; their backwards are recorded
in the opposite order once the last forward is. What one block gives is where the next one reads, and what the next one
sends back is where the first one begins, so that nothing is copied in between. All of it shares one memory pool, which
stays allocated: the activations of the stack, once for each shape.

A recorded kernel reads and writes fixed places. So a block runs as it is, not recorded, where that would not do: a second
forward before the backward of the first, gradients switched off, a hook that might keep an output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_liger.compilation.inner_hooks import inner_hooks
from lightning_liger.compilation.recorder import Recorder, without_cached_casts
from lightning_liger.compilation.replay import Recording, Replay, Slot, gradients
from lightning_liger.padding.attention import PackedCall, packed_call_of
from lightning_liger.patching import Rebound, Switch
from lightning_liger.report import PaddingReport

_SEEN_BEFORE = 2  # calls of a shape before it is recorded: they warm up what is
_WARM_UP = 2
_READS_BOUNDARIES = ("fa4", "fa3", "fa2", "varlen")


class CannotRecord(Exception):
    """Why a stack is not recorded."""


class _Shape:
    """All recordings of one stack for one kind of call."""

    def __init__(self, stack: RecordedStack) -> None:
        self.stack = stack
        self.calls = 0
        self.number = 0
        self.made: list[Recording] = []
        self.complete = False
        self.crowded = False
        self.waits = False
        self._slots: dict[int, Slot] = {}

    def run(self, index: int, block: RecordedBlock, args: Any, kwargs: Any) -> Any:
        if index == 0:
            self.calls += 1
            self.number += 1
        if self.calls <= self.stack.seen_before or self.stack.off:
            return block.original(*args, **kwargs)
        if index == 0 and not self.made and not self.crowded and not self.stack.recorder.has_room():
            self.crowded = True
            self.stack.refuse(
                "CUDA graphs: a shape was not recorded: its activations, which a recording keeps, do not fit into memory "
                "beside those of other shapes"
            )
        if index == 0:
            # recordings of all shapes share their memory: a backward that is still to come needs what is in it
            self.waits = not self.complete and block.in_flight
        if self.crowded or self.waits:
            return block.original(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        if not self.complete:
            if index != len(self.made):
                raise CannotRecord("its blocks are not called one after the other")
            self.made.append(self._record(block, leaves, spec))
            if index == len(self.stack.blocks) - 1:
                self._record_backwards()
        return self._replay(self.made[index], block, leaves, spec)

    def _replay(self, made: Recording, block: RecordedBlock, leaves: list[Any], spec: Any) -> Any:
        fits = not block.in_flight and made.places == [p.data_ptr() for p in made.parameters]
        if self.complete and not (fits and all(s.fill(leaves[i], self.number) for i, s in made.slots.items())):
            args, kwargs = tree_unflatten(leaves, spec)
            return block.original(*args, **kwargs)
        for i, place in made.inputs.items():
            if place.data_ptr() != leaves[i].data_ptr() or place.stride() != leaves[i].stride():
                place.data.copy_(leaves[i].data)
        block.runs, block.waits = block.runs + 1, False
        return made.rebuild(Replay.apply(made, block, *(leaves[i] for i in made.inputs), *made.parameters))

    def _record(self, block: RecordedBlock, leaves: list[Any], spec: Any) -> Recording:
        inputs: dict[int, Tensor] = {}
        slots: dict[int, Slot] = {}
        earlier = {t.data_ptr(): t for made in self.made[-1:] for t in made.outputs}
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if leaf.requires_grad:
                place = earlier.get(leaf.data_ptr())
                same = place is not None and (place.shape, place.stride()) == (leaf.shape, leaf.stride())
                place = place.data if same and place is not None else leaf.detach().clone()
                inputs[i] = place.requires_grad_()
            else:
                slots[i] = self._slots.setdefault(id(leaf), Slot(leaf))
                slots[i].filled_in = self.number
        fixed = [inputs[i] if i in inputs else slots[i].tensor if i in slots else leaf for i, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(fixed, spec)
        kwargs = _at_fixed_place(kwargs)
        parameters = [p for p in block.module.parameters() if p.requires_grad]
        wanted = [*inputs.values(), *parameters]
        if not wanted:
            raise CannotRecord("a block has nothing to train")
        self._warm_up(block, args, kwargs, wanted)
        _check_attention(kwargs["packed_call"])
        out, graph = self.stack.recorder.record(lambda: block.original(*args, **kwargs))
        flat, form = tree_flatten(out)
        numbers = [i for i, t in enumerate(flat) if isinstance(t, Tensor)]
        if not all(flat[i].requires_grad for i in numbers):
            raise CannotRecord("a block gives back something without gradients")
        rest = [None if i in numbers else t for i, t in enumerate(flat)]

        def rebuild(tensors: Sequence[Tensor]) -> Any:
            whole = list(rest)
            for i, t in zip(numbers, tensors, strict=True):
                whole[i] = t
            return tree_unflatten(whole, form)

        outputs = [flat[i] for i in numbers]
        places = [p.data_ptr() for p in parameters]
        again = partial(block.original, *args, **kwargs)
        return Recording(inputs, slots, parameters, places, graph, outputs, rebuild, wanted, again)

    def _warm_up(self, block: RecordedBlock, args: Any, kwargs: Any, wanted: list[Tensor]) -> None:
        with self.stack.recorder.aside(), without_cached_casts():
            for _ in range(_WARM_UP):
                out = [t for t in tree_flatten(block.original(*args, **kwargs))[0] if isinstance(t, Tensor)]
                torch.autograd.grad(out, wanted, [torch.zeros_like(t) for t in out], allow_unused=True)

    def _record_backwards(self) -> None:
        after: dict[int, Tensor] = {}
        for made in reversed(self.made):
            # where the next block's gradient for this output is, if it read it where it was written
            made.grad_outputs = [after.get(t.data_ptr(), torch.empty_like(t).detach()) for t in made.outputs]
            grads, made.backward = self.stack.recorder.record(partial(gradients, made))
            made.passes_on = made is not self.made[0]
            made.grad_inputs = [
                g if i < len(made.inputs) else self.stack.recorder.place(g) for i, g in enumerate(grads)
            ]
            made.outputs = [t.detach() for t in made.outputs]
            made.again = None
            pairs = zip(made.inputs.values(), grads, strict=False)
            after = {place.data_ptr(): g for place, g in pairs if g is not None and g.stride() == place.stride()}
            del grads, pairs  # the parameters' may be where the next backward works
        self._slots.clear()
        self.complete = True


class RecordedStack:
    """The blocks of one list, in order, and their recordings by shape.

    Args:
        blocks: in the order of their calls.
        limit: how many shapes are recorded; further ones run as they are.
        refuse: told why nothing is recorded.
        recorder: makes the graphs.

    Attributes:
        seen_before: calls of a shape before it is recorded.
        ready: whether what is to be recorded runs already, for so many tokens.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        limit: int,
        refuse: Callable[[str], None],
        recorder: Recorder | None = None,
    ) -> None:
        self.blocks = weakref.WeakKeyDictionary({block: i for i, block in enumerate(blocks)})
        self.limit = limit
        self.refuse = refuse
        self.off = ""
        self.seen_before = _SEEN_BEFORE
        self.ready: Callable[[int], bool] = lambda size: True
        self.recorder = recorder or Recorder()
        self._shapes: dict[Any, _Shape] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedStack:
        return self

    def run(self, block: RecordedBlock, key: Any, args: Any, kwargs: Any) -> Any:
        """The block's output, replayed where its shape was recorded."""
        if key not in self._shapes:
            if len(self._shapes) >= self.limit:
                self.refuse(f"CUDA graphs: {self.limit} shapes are recorded, others run as they are")
                return block.original(*args, **kwargs)
            self._shapes[key] = _Shape(self)
        try:
            return self._shapes[key].run(self.blocks[block.module], block, args, kwargs)
        except CannotRecord as reason:
            self.switch_off(str(reason))
        except torch.cuda.OutOfMemoryError:
            self.switch_off("its activations do not fit into memory of their own")
        block.why, block.waits = self.off, False
        return block.original(*args, **kwargs)

    def forget(self) -> None:
        """Free what was recorded."""
        self._shapes.clear()

    def switch_off(self, reason: str) -> None:
        """Run every block as it is from now on, and free what was recorded."""
        self.off = reason
        self.forget()
        self.refuse(f"CUDA graphs: not recorded: {reason}")


class RecordedBlock(Rebound):
    """``forward`` of one block, replayed in training where its shape was recorded."""

    feature = "blocks"

    def __init__(self, module: nn.Module, switch: Switch, stack: RecordedStack) -> None:
        super().__init__(module, switch)
        self.stack = stack
        self.latest: Any = lambda: None

    @property
    def way(self) -> str:
        return " + ".join([*(w for w in [getattr(self.previous, "way", "")] if w), "CUDA graphs"])

    @property
    def in_flight(self) -> bool:
        """Whether activations are kept for a backward that may still come."""
        latest = self.latest()
        return latest is not None and not latest.done

    def call(self, *args: Any, **kwargs: Any) -> Any:
        packed = packed_call_of(kwargs)
        if packed is None or self.stack.off or not torch.is_grad_enabled() or self._is_watched() or self._is_copy():
            self.why, self.waits = self.stack.off or "such a call is not recorded", not self.stack.off
            return self.original(*args, **kwargs)
        self.why, self.waits = "batches of this shape were too few yet to record it", True
        if not self.stack.ready(packed.layout.size):
            return self.original(*args, **kwargs)
        return self.stack.run(self, self._key(packed), args, kwargs)

    def _is_watched(self) -> bool:
        hooked = (
            self.module._forward_hooks or self.module._backward_hooks or any(True for _ in inner_hooks(self.module))
        )
        return bool(hooked) or torch._C._current_graph_task_id() != -1

    def _is_copy(self) -> bool:
        return self.module not in self.stack.blocks

    def _key(self, packed: PackedCall) -> Any:
        return packed.layout.shape_key, self.module.training


def _at_fixed_place(kwargs: dict[str, Any]) -> dict[str, Any]:
    """With a packed call that names the boundaries at their fixed place."""
    packed, cu_seqlens = packed_call_of(kwargs), kwargs.get("cu_seq_lens_q")
    if packed is None or cu_seqlens is None:
        raise CannotRecord("its blocks are not handed the boundaries of documents")
    placed = packed.layout.on(cu_seqlens.device)
    layout = replace(packed.layout, _placed={cu_seqlens.device: replace(placed, cu_seqlens=cu_seqlens)}, derived={})
    call = replace(packed, layout=layout, chosen={}, report=PaddingReport(""))
    return {**kwargs, "packed_call": call}


def _check_attention(call: PackedCall) -> None:
    """Whether all of a block's attention reads its documents where a recording finds them."""
    # compiled blocks choose nothing: their operators read the boundaries
    chosen = {backend.name for _, backend in call.chosen.values()}
    for name in sorted(chosen | {name for name in call.report.attention if "as the model was loaded" in name}):
        if name not in _READS_BOUNDARIES:
            raise CannotRecord(f"its attention ({name}) does not read the boundaries of documents from the device")
