"""Activation checkpointing of blocks: their inputs are kept, what they compute in between is computed again in backward.

``forward`` is rebound on each block, so that module names, state-dict keys and the hooks of FSDP (which stay outside of
the recomputation) are those of a block without it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, get_args

import torch
import torch.nn as nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_liger.choices import ActivationCheckpointing
from lightning_liger.modes import Modes
from lightning_liger.parallel.selecting import Level, Selection
from lightning_liger.patching import Rebound, Switch, bypass, bypass_reason, live_binding

MODES = get_args(ActivationCheckpointing)
_CACHES = ("past_key_values", "past_key_value", "cache", "layer_past")
_LEFT_TO_TRANSFORMERS = (
    "the model's own gradient checkpointing is on and stays in charge; without model.gradient_checkpointing_enable() "
    "activation_checkpointing={mode!r} would apply"
)
_WRITTEN_CACHE = (
    "{kind} ran without activation checkpointing where it writes into a cache that a second run would write again"
)
_KEPT_CACHE = (
    "a KV cache is filled while training and keeps the keys and values of checkpointed blocks in memory; "
    "use_cache=False saves them"
)


class Recomputed(Rebound):
    """``forward`` of one block whose activations are computed again in backward.

    Args:
        module: the block.
        switch: shared on/off flag.
        mode: ``"full"`` keeps nothing but the inputs; ``"selective"`` also what :meth:`select` says, until then what
            attention and every second matrix product gave.
        note: told, once for each reason, why a call was not checkpointed.
    """

    def __init__(self, module: nn.Module, switch: Switch, mode: str, note: Callable[[str], None]) -> None:
        super().__init__(module, switch)
        self.mode = mode
        self.note = note
        self.select(Selection(), 0, 1)
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        self._names = tuple(names)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._traced(*args, **kwargs)
        # also for calls that bypass every replacement: they need the memory just as much
        if not self.switch.on or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        return self.call(*args, **kwargs)

    def select(self, selection: Selection, position: int, tokens: int) -> None:
        """What selective checkpointing keeps of this block, the one at ``position`` of the model.

        Args:
            tokens: for code that is compiled, which keeps the same whatever the number of its tokens.
        """
        self._selection, self._position = selection, position
        self._compiled_level = selection.level(position, tokens)
        self._compiled_contexts = _contexts(self._compiled_level)

    def keeps(self, tokens: int) -> Level:
        """What this block keeps of a call with so many tokens."""
        if self.mode != "selective":
            return Level()
        return self._selection.level(self._position, tokens)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self._done_by_others():
            return self.original(*args, **kwargs)
        level = self._selection.level(self._position, _tokens((*args, *kwargs.values())))
        if self.mode == "selective" and level.all:
            return self.original(*args, **kwargs)
        caches = self._caches(args, kwargs)
        if not all(_only_grows(cache) for cache in caches):
            self.note(_WRITTEN_CACHE.format(kind=_kind(self.module)))
            return self.original(*args, **kwargs)
        if caches:
            self.note(_KEPT_CACHE)
        found = [_snapshot(cache) for cache in caches]
        reason, modes, again = bypass_reason(), Modes(self.module), False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal again
            if again and caches:
                fresh = {id(cache): _snapshot(before) for cache, before in zip(caches, found, strict=True)}
                args = tuple(fresh.get(id(a), a) for a in args)
                kwargs = {name: fresh.get(id(v), v) for name, v in kwargs.items()}
            again = True
            # backward runs in another context, where nothing is bypassed and adapters may be switched
            with bypass(reason), modes.restored():
                return self.original(*args, **kwargs)

        if self.mode == "selective":
            return checkpoint(run, *args, use_reentrant=False, context_fn=_contexts(level), **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        """The same for a compiled block, whose graph holds the checkpoint. A traced block has no cache to fill."""
        if self.previous is None:
            function = partial(getattr(type(self.module), self.name), self.module)  # so that Dynamo sees which one
        else:
            function = partial(self.previous)
        theirs = getattr(self.module, _OWN_FLAG, False) and self.module.training
        if not self.switch.on or not torch.is_grad_enabled() or theirs:
            return function(*args, **kwargs)
        if self.mode == "selective":
            if self._compiled_level.all:
                return function(*args, **kwargs)
            return checkpoint(function, *args, use_reentrant=False, context_fn=self._compiled_contexts, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def _caches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """What the block may write keys and values into; tuples of them are read only."""
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        suspects = [v for n, v in named.items() if n in _CACHES or hasattr(v, "get_seq_length")]
        return [v for v in suspects if v is not None and not isinstance(v, (tuple, list))]

    def _done_by_others(self) -> bool:
        if getattr(self.module, _OWN_FLAG, False) and self.module.training:
            self.note(_LEFT_TO_TRANSFORMERS.format(mode=self.mode))
            return True
        if inside_checkpoint():
            self.note(_LEFT_TO_TRANSFORMERS.format(mode=self.mode))
            return True
        return torch._C._current_graph_task_id() != -1  # recomputed in backward by somebody else


_OWN_FLAG = "gradient_checkpointing"


def recompute_blocks(
    blocks: Iterable[nn.Module], mode: str, switch: Switch, note: Callable[[str], None]
) -> list[Recomputed]:
    """Checkpoint the activations of each block, until ``switch`` is off or the bindings are unbound.

    Gradients and losses stay what they were, dropout included: random states are restored for the second run. A block
    whose model checkpoints by itself (``gradient_checkpointing_enable()``, before or after this call) is never
    recomputed twice.

    Args:
        blocks: modules that do not contain each other, such as decoder layers.
        mode: ``"none"``, ``"selective"`` or ``"full"``.
        switch: shared on/off flag.
        note: told, once for each reason, why a block or a call is not checkpointed.

    Returns:
        the bindings that are new.

    Raises:
        ValueError: an unknown mode.
    """
    check_mode(mode)
    made = []
    for block in blocks if mode != "none" else ():
        if live_binding(block, "forward", switch, Recomputed) is None:
            binding = Recomputed(block, switch, mode, note)
            binding.bind()
            made.append(binding)
    return made


def check_mode(mode: str) -> None:
    """Raise for what is no way of checkpointing."""
    if mode not in MODES:
        raise ValueError(f"activation_checkpointing={mode!r}: expected one of {', '.join(map(repr, MODES))}.")


@functools.cache
def _contexts(level: Level) -> Callable[[], Any]:
    """What makes the contexts of one region, with counters of its own."""

    def contexts() -> Any:
        products = {False: -1, True: -1}

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if is_product(op):
                products[context.is_recompute] += 1
                return _choice(level.keeps_product(products[context.is_recompute]))
            return _choice(level.attention and _is_attention(op) and not _draws(op, args, kwargs))

        return create_selective_checkpoint_contexts(policy)

    return contexts


def _tokens(arguments: tuple[Any, ...]) -> int:
    hidden = next((a for a in arguments if isinstance(a, torch.Tensor)), None)
    return 1 if hidden is None or not hidden.dim() else hidden.numel() // max(hidden.shape[-1], 1)


def _choice(keep: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def is_product(op: Any) -> bool:
    """Whether an operator is a matrix product, whose result selective checkpointing may keep."""
    # not bmm: attention without a fused kernel multiplies (T, T) matrices, which are not worth their memory
    return op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default)


def _is_attention(op: Any) -> bool:
    name = str(getattr(op, "_name", op)).lower()
    # also flash-attn's and other packages' own operators, and the exchange of heads in sequence parallelism
    known = "attention" in name or "attn" in name or "all_to_all" in name
    return known and "backward" not in name


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it has dropout. A kept result is not computed again, and later dropouts would then draw other numbers."""
    schema = getattr(op, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if "dropout" in argument.name:
            value = kwargs.get(argument.name, args[position] if position < len(args) else argument.default_value)
            return bool(value)
    return False


def inside_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint around this call packs what autograd saves."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "__qualname__", "").startswith(
        ("_checkpoint_hook", "_recomputation_hook")
    )


def _only_grows(cache: Any) -> bool:
    """Whether an update makes new tensors and leaves the old ones as they were, so that it can be done over."""
    layers = getattr(cache, "layers", None)
    growing = {"DynamicLayer", "DynamicSlidingWindowLayer"}
    return type(cache).__name__ == "DynamicCache" and all(type(layer).__name__ in growing for layer in layers or ())


def _snapshot(cache: Any) -> Any:
    """The same tensors in a cache of their own."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    return made


def _kind(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")
