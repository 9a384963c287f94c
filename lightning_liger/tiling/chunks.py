"""A function of single tokens, computed chunk by chunk, and again chunk by chunk in backward.

Bekman et al., "Arctic Long Sequence Training" (arXiv:2506.13996), section 3.2, as DeepSpeed's ``TiledMLP`` and Liger's
``LigerTiledMLPFunction`` do it, with three differences. Parameters are inputs of the autograd node and get their gradient
once, as the sum over all chunks, in fp32: hooks of DDP, FSDP and optimizers see one gradient, and bf16 loses nothing
by the number of chunks. Random numbers, autocast and adapters are in backward what they were in forward. And the input is
kept by a node of its own, ahead of the computation, so that a checkpoint around it has nothing left to compute when its
second run comes here: under activation checkpointing chunks cost no further forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from lightning_liger.modes import Modes
from lightning_liger.patching import bypass, bypass_reason

Call = Callable[[Tensor], Tensor]


def parts(tokens: int, chunk: int) -> list[slice]:
    """As few slices of at most ``chunk`` tokens as there can be, of like length."""
    count = max(-(-tokens // chunk), 1)
    length = max(-(-tokens // count), 1)
    return [slice(start, min(start + length, tokens)) for start in range(0, tokens, length)]


def as_rows(x: Tensor) -> Tensor:
    """``(..., H)`` as ``(1, T, H)``; ``(T, H)`` stays."""
    return x if x.dim() == 2 else x.reshape(1, -1, x.shape[-1])


def in_chunks(call: Call, module: nn.Module, x: Tensor, chunk: int) -> Tensor:
    """``call(x)``, with the memory of a call with ``chunk`` tokens.

    Args:
        call: maps ``(1, T, H)`` to ``(1, T, W)`` (or ``(T, H)`` to ``(T, W)``), every token by itself.
        module: holds all parameters that ``call`` uses.
        x: ``(..., H)``.
        chunk: tokens computed at a time, at most.

    Returns:
        ``(..., W)`` in the dtype that ``call`` gives.

    Raises:
        RuntimeError: in a backward with ``create_graph=True``.
    """
    rows = as_rows(x)
    names, weights = trained(module)
    if torch.is_grad_enabled() and (rows.requires_grad or weights):
        place: list[Any] = []
        if rows.requires_grad:
            rows = _Kept.apply(rows, place)
        job = _Job(call, module, chunk, names, place)
        out: Tensor = _InChunks.apply(job, rows, *weights)
    else:
        out = _forward(call, rows, chunk)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def trained(module: nn.Module) -> tuple[list[str], list[Tensor]]:
    """Names and values of the parameters that train."""
    found = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    return [n for n, _ in found], [p for _, p in found]


def _forward(call: Call, rows: Tensor, chunk: int) -> Tensor:
    out: Tensor | None = None
    for part in parts(rows.shape[-2], chunk):
        made = call(rows[..., part, :])
        if out is None:
            out = made.new_empty((*rows.shape[:-1], made.shape[-1]))
        out[..., part, :] = made
        del made
    assert out is not None
    return out


class _Job:
    """What forward and backward of one call share."""

    def __init__(self, call: Call, module: nn.Module, chunk: int, names: Sequence[str], place: list[Any]) -> None:
        self.call, self.module, self.chunk, self.names, self.place = call, module, chunk, names, place
        self.reason, self.modes = bypass_reason(), Modes(module)

    def begin(self, device: torch.device) -> None:
        kind = self.kind = device.type
        self.cuda = [device] if kind == "cuda" else []
        self.autocast: torch.dtype | None = None
        if kind != "meta" and torch.is_autocast_enabled(kind):
            self.autocast = torch.get_autocast_dtype(kind)
        self.random = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self.cuda]

    def weights(self) -> list[Tensor]:
        known = dict(self.module.named_parameters())
        return [known[name] for name in self.names]

    @contextmanager
    def again(self) -> Iterator[None]:
        """As it was in forward."""
        with ExitStack() as stack:
            stack.enter_context(bypass(self.reason))
            stack.enter_context(self.modes.restored())
            stack.enter_context(torch.random.fork_rng(devices=self.cuda))
            if self.kind != "meta":
                stack.enter_context(torch.autocast(self.kind, self.autocast, enabled=self.autocast is not None))
            torch.set_rng_state(self.random[0])
            for device, state in zip(self.cuda, self.random[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


class _Kept(torch.autograd.Function):
    """Keeps its argument for :class:`_InChunks`, which asks for it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        place.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.job = job
        job.begin(rows.device)
        if not job.place:
            ctx.save_for_backward(rows)
        with unseen(), _uncached(rows.device):
            return _forward(job.call, rows, job.chunk)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("MLPs in chunks have no second derivative (create_graph=True). Use tiled_mlp=False.")
        job: _Job = ctx.job
        (rows,) = (job.place[0] if job.place else ctx).saved_tensors
        needs = ctx.needs_input_grad[1:]
        weights = job.weights()
        wanted = [w for w, need in zip(weights, needs[1:], strict=True) if need]
        sums = _Sums(wanted)
        made = torch.empty_like(rows) if needs[0] else None
        with job.again(), torch.enable_grad():
            for part in parts(rows.shape[-2], job.chunk):
                x = rows[..., part, :].detach().requires_grad_(needs[0])
                inputs = [x, *wanted] if needs[0] else wanted
                found: list[Tensor | None] = list(
                    torch.autograd.grad(job.call(x), inputs, gradient[..., part, :], allow_unused=True)
                )
                if made is not None:
                    of_x = found.pop(0)
                    with torch.no_grad():
                        made[..., part, :] = 0.0 if of_x is None else of_x
                    del of_x
                sums.add(found)
        given = iter(sums.results())
        return None, made, *(next(given) if need else None for need in needs[1:])


class _Sums:
    """Gradients of parameters, added up in fp32 at least."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._dtypes = [w.dtype for w in like]
        self._sums: list[Tensor | None] = [None] * len(like)
        self._owned = [False] * len(like)

    @torch.no_grad()
    def add(self, found: list[Tensor | None]) -> None:
        for i, gradient in enumerate(found):
            found[i] = None  # freed as soon as it is added
            if gradient is None:
                continue
            total = self._sums[i]
            if total is None:
                self._sums[i] = gradient  # perhaps a view of what somebody else holds
            elif self._owned[i]:
                total.add_(gradient)
            else:
                low = total.dtype.itemsize < 4
                self._sums[i] = total.float().add_(gradient) if low else total + gradient
                self._owned[i] = True

    def results(self) -> list[Tensor | None]:
        return [None if s is None else s.to(d) for s, d in zip(self._sums, self._dtypes, strict=True)]


def unseen() -> AbstractContextManager[None]:
    """Selective checkpointing counts and keeps what operators give, which for chunks it never shall."""
    modes = _get_current_dispatch_mode_stack()
    counting = any("Cach" in type(m).__name__ or getattr(m, "counts_products", False) for m in modes)
    return _disable_current_modes() if counting else nullcontext()


def _uncached(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast's copies of weights made here have no gradient, and must not be found by later code that needs one."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)
