"""``forward`` of one MLP, in chunks of tokens where a call is long enough."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from lightning_liger.choices import TiledChoice
from lightning_liger.compilation.inner_hooks import foreign_hook
from lightning_liger.parallel.recompute import inside_checkpoint
from lightning_liger.patching import Rebound, Switch
from lightning_liger.tiling.chunks import in_chunks, parts, trained, unseen
from lightning_liger.tiling.report import TilingReport

# Of one call on an H200: matrix products of so many rows run at full speed, and what lies between them is 1.5 GB at the
# width of a 7B model.
CHUNK = 8192
# Where nobody asked: shorter calls have memory to spare, and chunks add up gradients of weights once for each chunk.
AUTO_FROM = 32768


def chunk_size(choice: TiledChoice, tokens: int, *, recomputed: bool) -> int:
    """How many tokens at a time a call with ``tokens`` tokens computes; 0 for all of them.

    Args:
        choice: the ``tiled_mlp`` option.
        recomputed: what the MLP computes is computed again in backward anyway, or there is no backward.
    """
    if choice == "auto":
        return CHUNK if recomputed and tokens >= AUTO_FROM else 0
    if choice is False:
        return 0
    chunk = CHUNK if choice is True else int(choice)
    return chunk if tokens > chunk else 0


class TiledMLP(Rebound):
    """``forward`` of an MLP that treats every token by itself.

    Args:
        module, switch: see :class:`Rebound`.
        choice: the ``tiled_mlp`` option.
        report: counts calls, and is told why one was not computed in chunks.
    """

    def __init__(self, module: nn.Module, switch: Switch, choice: TiledChoice, report: TilingReport) -> None:
        super().__init__(module, switch)
        self.choice = choice
        self.report = report
        self._own: bool | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if type(x) is not Tensor or x.dim() < 2 or not x.is_floating_point():
            return self.original(*args, **kwargs)
        tokens = x.numel() // max(x.shape[-1], 1)
        chunk = chunk_size(self.choice, tokens, recomputed=not torch.is_grad_enabled() or _recomputed())
        if not chunk:
            return self.original(x)
        if reason := self._why_not(x):
            self.report.refuse(f"{_name(self.module)}: {reason}")
            return self.original(x)
        self.report.ran(tokens, len(parts(tokens, chunk)))
        return in_chunks(self.original, self.module, x, chunk)

    def _why_not(self, x: Tensor) -> str:
        if torch._C._are_functorch_transforms_active():
            return "inside a torch.func transform"
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return "recorded as a CUDA graph"
        if hook := foreign_hook(self.module):
            return f"{hook}, and would see chunks"
        if torch.is_grad_enabled() and self._own is None:
            self._own = self._uses_own_parameters(x)
        return "" if self._own is not False else "it uses parameters of other modules"

    def _uses_own_parameters(self, x: Tensor) -> bool:
        """Whether the gradient of one token's result reaches nothing but the module's parameters."""
        known = {id(w) for w in trained(self.module)[1]}
        token = x.detach()[(0,) * (x.dim() - 2)][:1]
        token = token if x.dim() == 2 else token[None]
        devices = [x.device] if x.is_cuda else []
        # a checkpoint around this call must not wait for what is computed here
        kept = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.random.fork_rng(devices=devices), unseen(), kept:
            return all(id(leaf) in known for leaf in _leaves(self.original(token)))

    # -- in compiled code --------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self.previous is None:
            return _traced(self.module, self.choice, *args, **kwargs)
        return super().__call__(*args, **kwargs)

    def traced_form(self) -> Callable[..., Any] | None:
        """What stands for it in compiled code, the same function for all layers of a model; None: nothing."""
        if not self.switch.on or self.choice in (False, "auto"):
            return None
        return types.MethodType(_traced_function(int(CHUNK if self.choice is True else self.choice)), self.module)


@functools.cache
def _traced_function(chunk: int) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _traced(module, chunk, *args, **kwargs)

    return forward


def _traced(module: nn.Module, choice: TiledChoice, *args: Any, **kwargs: Any) -> Any:
    """The same in operators that a compiler sees, with one checkpoint for each chunk."""
    function = functools.partial(type(module).forward, module)
    if len(args) != 1 or kwargs or choice in (False, "auto"):
        return function(*args, **kwargs)
    (x,) = args
    chunk = CHUNK if choice is True else int(choice)
    rows = x if x.dim() == 2 else x.reshape(1, -1, x.shape[-1])
    count = -(-rows.shape[-2] // chunk)
    if count < 2:
        return function(x)
    made = []
    for part in rows.chunk(count, dim=-2):
        made.append(checkpoint(function, part, use_reentrant=False) if torch.is_grad_enabled() else function(part))
    out = torch.cat(made, dim=-2)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _recomputed() -> bool:
    """Whether this call is part of a checkpoint that keeps nothing of it, or of one's second run."""
    if any("Cach" in type(mode).__name__ for mode in _get_current_dispatch_mode_stack()):
        return False
    return inside_checkpoint() or torch._C._current_graph_task_id() != -1


def _leaves(output: Any) -> Iterator[Tensor]:
    """The tensors that gradients of ``output`` end in."""
    found = [getattr(output, "grad_fn", None)]
    seen: set[Any] = set()
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        found += [following for following, _ in node.next_functions]


def _name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")
