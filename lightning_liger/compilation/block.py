"""One decoder block, compiled; all blocks of a kind share one graph for each shape of a packed batch.

``forward`` is rebound on the instance. What wraps the block's ``__call__`` (hooks of FSDP, of adapters, of the user)
stays outside of the graph; what is bound below (activation checkpointing, kernels) is traced into it.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.compilation.inner_hooks import foreign_hook, inner_hooks
from lightning_liger.padding.attention import PackedCall, packed_attention, packed_call_of
from lightning_liger.padding.backends.traced import TracedCall, why_not_traced
from lightning_liger.patching import Rebound, Switch
from lightning_liger.report import PaddingReport

# each costs a compilation of some seconds; code for any size is a little slower
_SIZES = 6
_NUMBERS = itertools.count()
_CACHES = ("past_key_values", "cache", "past_key_value", "layer_past")


def _block(module: nn.Module, previous: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    longest = kwargs["packed_call"].longest
    kwargs = {**kwargs, "max_length_q": longest, "max_length_k": longest}
    if previous is None:
        # written so that Dynamo sees which function is meant
        return type(module).forward(module, *args, **kwargs)
    return previous(*args, **kwargs)


def _own_code(name: str) -> Callable[..., Any]:
    """:func:`_block` under a code object of its own: the compiler counts, and gives up, by code object."""
    code = _block.__code__.replace(co_name=f"{name}_{next(_NUMBERS)}")
    return types.FunctionType(code, globals(), code.co_name)


@dataclass
class Graphs:
    """The compiled code of all blocks of one module.

    Args:
        backend: of ``torch.compile``.
        refuse: told, once for each reason, why blocks of a kind run as they are.
        patience: batches of a size after which code is made for it; until then blocks run as they are. Code for one size
            takes seconds to make, which a size that is met once would never earn back.
    """

    backend: str | Callable[..., Any]
    refuse: Callable[[str], None]
    patience: int = 0
    _made: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    _off: dict[type, str] = field(default_factory=dict)
    _met: Counter[int] = field(default_factory=Counter)
    _sizes: set[int] = field(default_factory=set)
    _any_size: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return self

    def why_off(self, module: nn.Module) -> str:
        """Why blocks like this one are not compiled, or ``""``."""
        return self._off.get(type(module), "")

    def switch_off(self, module: nn.Module, reason: str) -> None:
        """Run blocks like this one as they are from now on."""
        name = type(module).__name__.removeprefix("FSDP")
        self._off[type(module)] = reason
        self.refuse(f"{name} is not compiled: {reason}")

    def meet(self, size: int) -> None:
        """A batch of so many tokens is about to run."""
        self._met[size] += 1

    def on_trial(self, refuse: Callable[[str], None]) -> Graphs:
        """Others, which make code at once; what they make is found here later."""
        return Graphs(self.backend, refuse, _made=self._made)

    def admit(self, size: int) -> None:
        """Make code for this size without further waiting."""
        if len(self._sizes) < _SIZES:
            self._sizes.add(size)

    def settle(self) -> None:
        """Between two batches: code may be made from now on for the sizes that were met often enough."""
        for size, times in self._met.items():
            if times > self.patience and len(self._sizes) < _SIZES:
                self._sizes.add(size)
        others = sum(times for size, times in self._met.items() if size not in self._sizes)
        self._any_size = self._any_size or (len(self._sizes) >= _SIZES and others > self.patience)

    def takes(self, size: int) -> bool:
        """Whether blocks run compiled for batches of this size."""
        if not self.patience and len(self._sizes) < _SIZES:
            self._sizes.add(size)
        return size in self._sizes or self._any_size or not self.patience

    def function(self, module: nn.Module, size: int) -> Callable[..., Any]:
        """The compiled block of this kind for batches of ``size`` tokens; after some sizes one for all others."""
        kind = type(module)
        key = (kind, torch.is_grad_enabled(), size if size in self._sizes else None)
        if key not in self._made:
            own = _own_code(kind.__name__)
            self._made[key] = torch.compile(own, fullgraph=True, dynamic=key[2] is None, backend=self.backend)
        return self._made[key]


class CompiledBlock(Rebound):
    """``forward`` of one block on compiled code, for calls whose documents are known.

    Args:
        graphs: shared by all blocks.
        attention: the layers of this block that look up their attention function.
    """

    feature = "blocks"
    way = "compiled"

    def __init__(self, module: nn.Module, switch: Switch, graphs: Graphs, attention: Sequence[nn.Module]) -> None:
        super().__init__(module, switch)
        self.graphs = graphs
        self.attention = tuple(attention)
        self._backends: dict[Any, str] = {}
        self._bound: list[tuple[nn.Module, Rebound, Any]] = []

    def call(self, *args: Any, **kwargs: Any) -> Any:
        packed = packed_call_of(kwargs)
        if packed is None:
            return self._aside("its batch is not packed", True, args, kwargs)
        if reason := self.graphs.why_off(self.module):
            return self._aside(reason, False, args, kwargs)
        if self._unusual(kwargs):
            return self._aside("it was handed a cache", True, args, kwargs)
        if not self.graphs.takes(packed.layout.size):
            return self._aside("batches of this size were too few yet to make code for them", True, args, kwargs)
        if any(True for _ in inner_hooks(self.module)):
            if reason := foreign_hook(self.module):
                self.graphs.switch_off(self.module, reason)
            return self._aside(reason or "it was watched from inside", not reason, args, kwargs)
        backend = self._backend(packed, args, kwargs)
        if not backend:
            return self._aside(self.graphs.why_off(self.module), False, args, kwargs)
        for layer in self.attention:
            packed.attended(backend, layer)
        layout = packed.layout
        traced = TracedCall.of(kwargs["cu_seq_lens_q"], layout.longest, backend, packed.sequence)
        given = {**kwargs, "packed_call": traced, "max_length_q": None, "max_length_k": None}
        run = self.graphs.function(self.module, layout.size)
        try:
            with self._traceable():
                out = run(self.module, self.previous, args, given)
        except torch._dynamo.exc.TorchDynamoException as error:
            self.graphs.switch_off(self.module, _short(error))
            return self._aside(_short(error), False, args, kwargs)
        self.runs += 1
        return out

    def _aside(self, reason: str, waits: bool, args: Any, kwargs: Any) -> Any:
        self.why, self.waits = reason, waits
        return self.original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a block recomputed in backward must be the block that ran, even when the switch went off in between
        if packed_call_of(kwargs) is not None and torch._C._current_graph_task_id() != -1:
            return self.call(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _unusual(self, kwargs: dict[str, Any]) -> bool:
        return "packed_call" not in kwargs or any(kwargs.get(name) is not None for name in _CACHES)

    @contextlib.contextmanager
    def _traceable(self) -> Iterator[None]:
        """The block as its class has it: the compiler would make one graph for each binding that it meets."""
        if not self._bound or not all(module.__dict__.get("forward") is bound for module, bound, _ in self._bound):
            self._bound = _bindings_inside(self.module)
        with contextlib.ExitStack() as stack:
            for config in {id(a.config): a.config for a in self.attention}.values():
                stack.enter_context(packed_attention(config))
            for module, _, before in self._bound:
                if before is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before
            try:
                yield
            finally:
                for module, bound, _ in self._bound:
                    module.__dict__["forward"] = bound

    def _backend(self, packed: PackedCall, args: Any, kwargs: dict[str, Any]) -> str:
        """Name of the attention backend that the block takes for such a batch; ``""`` if it cannot be compiled."""
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        key = (tensors[0].dtype, torch.is_autocast_enabled(tensors[0].device.type), packed.layout.shape_key)
        if key not in self._backends:
            self._backends[key] = self._ask(packed, args, kwargs)
        return self._backends[key]

    def _ask(self, packed: PackedCall, args: Any, kwargs: dict[str, Any]) -> str:
        """Run the block once without gradients, and see."""
        trial = replace(packed, chosen={}, report=PaddingReport(""))
        devices = [d for d in {t.device for t in self.module.parameters()} if d.type == "cuda"]
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            self.original(*args, **{**kwargs, "packed_call": trial})
        names = {backend.name for _, backend in trial.chosen.values()}
        reasons = {why for features, backend in trial.chosen.values() if (why := why_not_traced(backend, features))}
        if len(names) != 1:
            reasons.add("its attention is not one of ours" if not names else "its layers attend in different ways")
        if reasons:
            self.graphs.switch_off(self.module, "; ".join(sorted(reasons)))
            return ""
        return names.pop()


def _bindings_inside(block: nn.Module) -> list[tuple[nn.Module, Rebound, Any]]:
    """``(module, its binding, what is traced instead)`` for the modules inside of a block."""
    made = []
    for module in block.modules():
        bound = before = module.__dict__.get("forward")
        traced = None
        while isinstance(before, Rebound):
            traced = traced or before.traced_form()
            before = before.previous
        before = traced or before
        if isinstance(bound, Rebound) and module is not block:
            made.append((module, bound, before))
    return made


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
