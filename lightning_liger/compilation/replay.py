"""One recorded block: what is at fixed places, and how autograd replays it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten


class Slot:
    """A tensor at a fixed place, which several blocks of a stack read."""

    def __init__(self, source: Tensor) -> None:
        self.tensor = source.detach().clone()
        self.source: tuple[Tensor, int] = (source, source._version)
        self.filled_in = -1

    def fill(self, source: Tensor, number: int) -> bool:
        """Copy ``source`` here, in pass ``number``; False if another tensor was put here in the same pass."""
        known, version = self.source
        if known is source and version == source._version:
            self.filled_in = number
            return True
        if self.filled_in == number:
            return False
        self.tensor.copy_(source)
        self.source, self.filled_in = (source, source._version), number
        return True


class Pass:
    """One forward through a recorded block, until its backward is done or nobody can ask for it any more."""

    done = False


@dataclass
class Recording:
    """Forward and backward of one block at fixed places.

    Attributes:
        inputs: where the differentiable inputs are, by their number among the leaves of the call.
        slots: where the others are.
        outputs: what the forward gives, its tensors only.
        again: the block itself on these inputs, as long as its backward is not recorded.
        passes_on: the gradients of ``inputs`` are read by the block before at once, at the place where they are.
        grad_inputs: gradients of ``alive``; of the parameters' only the places are held, which backwards of other blocks
            use too.
    """

    inputs: dict[int, Tensor]
    slots: dict[int, Slot]
    parameters: list[nn.Parameter]
    places: list[int]
    forward: Any
    outputs: list[Tensor]
    rebuild: Callable[[Sequence[Tensor]], Any]
    alive: list[Tensor]
    again: Callable[[], Any] | None
    backward: Any = None
    passes_on: bool = True
    grad_outputs: list[Tensor] = field(default_factory=list)
    grad_inputs: list[Tensor | None] = field(default_factory=list)

    def grads_to_keep(self) -> list[Tensor | None]:
        """What the backward has just computed, in memory that no further replay writes to.

        Autograd may make the very tensor that it gets a parameter's ``grad``, or give it to whoever asked for it.
        """
        given = [None if g is None else g.detach() for g in self.grad_inputs]
        first = len(self.inputs) if self.passes_on else 0
        kept = [i for i, g in enumerate(given) if g is not None and i >= first]
        places = [g for i in kept if (g := given[i]) is not None]
        copies = [torch.empty_like(g) for g in places]
        if copies:
            torch._foreach_copy_(copies, places)
        for i, copy in zip(kept, copies, strict=True):
            given[i] = copy
        return given


def gradients(made: Recording) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(made.outputs, made.alive, made.grad_outputs, allow_unused=True)


class Replay(torch.autograd.Function):
    """Inputs are at their places already; tensors are passed to say what the gradients are for."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, block: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        if recording.backward is None:
            ctx.random = torch.get_rng_state(), recording.alive[0].device, _device_state(recording.alive[0].device)
        recording.forward.replay()
        ctx.recording, ctx.block, ctx.latest = recording, block, Pass()
        block.latest = weakref.ref(ctx.latest)
        # not detach(): whoever writes into an output must not make the recording's own tensors look changed
        return tuple(t.data for t in recording.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        recording = ctx.recording
        if ctx.block.latest() is not ctx.latest:
            raise RuntimeError(
                "A block that is replayed as a CUDA graph ran again before this backward, and has forgotten its "
                "activations. Set compile=True instead of compile='cudagraphs'."
            )
        if recording.backward is None:
            ctx.latest.done = True
            return (None, None, *_computed_again(recording, grads, ctx.random))
        for place, grad in zip(recording.grad_outputs, grads, strict=True):
            if place.data_ptr() != grad.data_ptr() or place.stride() != grad.stride():
                place.copy_(grad)
        recording.backward.replay()
        ctx.latest.done = True
        return (None, None, *recording.grads_to_keep())


def _device_state(device: torch.device) -> Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _computed_again(recording: Recording, grads: Sequence[Tensor], random: Any) -> tuple[Tensor | None, ...]:
    """The gradients where recording ended before this backward: from the block itself, with the same random numbers."""
    state, device, device_state = random
    assert recording.again is not None
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)
        out = [t for t in tree_flatten(recording.again())[0] if isinstance(t, Tensor)]
        return torch.autograd.grad(out, recording.alive, grads, allow_unused=True)
