"""Forward and backward of one block in several ways, in turn, on the inputs of a real call."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_liger.compilation.recorder import without_cached_casts
from lightning_liger.tuning.decision import Cost

Run = Callable[..., Any]
_ROUNDS = 5
_MOST_SECONDS = 6.0  # of the rounds; compilation comes first and has its own bound
# relative to the largest norm; what a block adds in bf16 is rounded to about 4e-3
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 1e-3}


class Trial:
    """One block with the inputs of one call.

    Args:
        block: its parameters are whole, as they are when the model calls it.
        args, kwargs: of that call; tensors are copied.
    """

    def __init__(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, self._spec = tree_flatten((args, kwargs))
        self._leaves = [
            t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) and t.requires_grad else t
            for t in leaves
        ]
        self.block = block
        inputs = [t for t in self._leaves if isinstance(t, Tensor) and t.requires_grad]
        self.wanted = [*inputs, *(p for p in block.parameters() if p.requires_grad)]
        self.device = next(t.device for t in (*leaves, *block.parameters()) if isinstance(t, Tensor))
        self._grads: list[Tensor] = []

    def forward(self, run: Run) -> list[Tensor]:
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        return [t for t in tree_flatten(run(*args, **kwargs))[0] if isinstance(t, Tensor) and t.requires_grad]

    def once(self, run: Run) -> list[Tensor]:
        """Outputs and gradients."""
        out = self.forward(run)
        if not self._grads:
            generator = torch.Generator(self.device).manual_seed(0)
            # as large as a loss over all tokens would make them matters to no time
            self._grads = [torch.randn(t.shape, generator=generator, device=t.device).to(t.dtype) for t in out]
        found = torch.autograd.grad(out, self.wanted, self._grads, allow_unused=True)
        return [t.detach() for t in (*out, *(g for g in found if g is not None))]

    def kept(self, run: Run) -> int:
        """Bytes from the forward to the backward."""
        if self.device.type != "cuda":
            return 0
        before = torch.cuda.memory_allocated(self.device)
        out = self.forward(run)
        after = torch.cuda.memory_allocated(self.device)
        del out
        return max(0, after - before)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def differ(found: list[Tensor], wanted: list[Tensor]) -> str:
    """Why two results are not those of one and the same function, or ``""``."""
    if len(found) != len(wanted):
        return "it gives other gradients"
    for a, b in zip(found, wanted, strict=True):
        off = float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-20))
        if not off <= _TOLERANCE.get(b.dtype, 1e-3):
            return f"its results are off by {off:.1e}"
    return ""


def measure(
    trial: Trial, ways: Mapping[Any, tuple[Callable[[], None], Run]], plain: Any, seconds: float
) -> dict[Any, Cost]:
    """What each way costs; they take turns, so that a device that slows down slows all of them.

    Args:
        ways: what to do before each turn (switch kernels on or off), and the block's forward.
        plain: the way that the others are compared with.
        seconds: no further way is prepared after so many of them.
    """
    begin = time.perf_counter()
    costs: dict[Any, Cost] = {}
    reference: list[Tensor] = []
    for way in sorted(ways, key=lambda w: w != plain):
        prepare, run = ways[way]
        if way != plain and time.perf_counter() - begin > seconds:
            costs[way] = Cost(problem="there was no time left")
            continue
        prepare()
        try:
            for _ in range(4):  # recordings are made at the third call
                found = trial.once(run)
            if way == plain:
                reference = found
            problem = differ(found, reference)
            costs[way] = Cost(0.0, trial.kept(run), problem)
        except torch.cuda.OutOfMemoryError:
            costs[way] = Cost(problem="out of memory")
        except Exception as error:  # whatever a compiler or a kernel has against this block
            if way == plain:
                raise
            costs[way] = Cost(
                problem=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
            )
    running = {way: ways[way] for way, cost in costs.items() if not cost.problem}
    times: dict[Any, list[float]] = {way: [] for way in running}
    repeats = 1
    begin = time.perf_counter()
    for number in range(_ROUNDS + 1):
        for way, (prepare, run) in running.items():
            prepare()
            times[way].append(_seconds(trial, run, repeats))
        if number == 0:
            # the first round warms up, and says how many repetitions there is time for
            each = sum(t[0] for t in times.values())
            repeats = int(min(8, max(1, _MOST_SECONDS / _ROUNDS // max(each, 1e-6))))
            times = {way: [] for way in running}
        elif time.perf_counter() - begin > _MOST_SECONDS:
            break
    return {
        way: Cost(1e3 * statistics.median(times[way]), cost.kept) if way in running else cost
        for way, cost in costs.items()
    }


def _seconds(trial: Trial, run: Run, repeats: int) -> float:
    trial.wait()
    begin = time.perf_counter()
    for _ in range(repeats):
        trial.once(run)
    trial.wait()
    return (time.perf_counter() - begin) / repeats


@contextmanager
def untouched(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside: gradients on, nothing that watches what autograd saves, no cached casts. Afterwards all is as before.

    Random states and buffers of the block are put back. Gradients of parameters are never written here.
    """
    buffers = [(b, b.detach().clone()) for b in block.buffers()]
    hooks = []
    # a checkpoint around this call would take what is saved here for what its block saves
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    # reentrant checkpoints know no torch.autograd.grad; that blocks run twice is the same for all ways of running them
    checkpointed = vars(block).get("gradient_checkpointing")
    if checkpointed:
        vars(block)["gradient_checkpointing"] = False
    try:
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), without_cached_casts():
            yield
    finally:
        if checkpointed:
            vars(block)["gradient_checkpointing"] = checkpointed
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        gc.collect()
