"""The values a module's own initialisers would have given to tensors that were made without memory.

The initialisers run on a *shadow*: the same modules with tensors of their own, of which only those that need a value have
memory. Whatever else an initialiser writes to is ``meta`` there, so that nothing which has its value already can change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

_WHOLE = ("init_weights", "initialize_weights", "_initialize_weights", "init_parameters")
_ONE = ("reset_parameters", "_reset_parameters")


class Uninitialised(ValueError):
    """Tensors that no initialiser wrote to; names them."""


def tensors_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """``(path, owner, name, tensor)`` of parameters, buffers and tensors kept as plain attributes; shared ones repeat."""
    for path, inner in module.named_modules(remove_duplicate=False):
        for own in (inner._parameters, inner._buffers, vars(inner)):
            for name, tensor in own.items():
                if isinstance(tensor, Tensor):
                    yield f"{path}.{name}" if path else name, inner, name, tensor


@torch.no_grad()
def initial_values(
    module: nn.Module,
    wanted: Collection[str],
    fallback: Callable[[nn.Module, Collection[str]], dict[str, Tensor]] = lambda module, missing: {},
) -> dict[str, Tensor]:
    """What a build on the CPU would have put into tensors of ``module``.

    The order of construction is followed: for each module, submodules first, ``reset_parameters()``, then
    ``_init_weights(m)`` on each module below it, then ``init_weights()``; whichever of them it has. A transformers model
    initialises itself, rotary frequencies and other computed buffers included. With the random state that the module
    was built under, the values are those of a CPU build wherever the constructors do just that.

    Args:
        module: holds the tensors, on ``meta`` or sharded; it is not changed.
        wanted: paths of parameters, buffers or tensor attributes.
        fallback: answers with values for what no initialiser wrote to, or for a part of it.

    Returns:
        path -> tensor on the CPU, of the shape and dtype of the one it is for.

    Raises:
        Uninitialised: nothing wrote to some of them.
    """
    shadow = _Shadow(set(wanted))
    copied = shadow.of(module, "")
    with torch.random.fork_rng(devices=[]):
        _construct(copied, shadow.holders)
        _adapters(copied, shadow.holders)
        missing = [path for path in wanted if shadow.untouched(path)]
        shadow.made.update(fallback(module, missing) if missing else {})
    missing = [path for path in missing if shadow.untouched(path)]
    if missing:
        kinds = sorted({_owner_kind(module, path) for path in missing})
        raise Uninitialised(
            f"{len(missing)} tensors were built on the meta device and nothing gives them a value: "
            f"{', '.join(missing[:8])}{', …' if len(missing) > 8 else ''} (in {', '.join(kinds)}). "
            "Give these modules a reset_parameters() that writes all of their tensors, build them outside of the meta "
            "device, or name a checkpoint that holds them."
        )
    return {path: shadow.made[path] for path in wanted}


def meta_twin(module: nn.Module) -> tuple[nn.Module, dict[int, nn.Module]]:
    """The same modules with ``meta`` tensors of the whole shapes; and ``id`` of a submodule -> its counterpart."""
    shadow = _Shadow(set())
    return shadow.of(module, ""), shadow.counterparts


class _Shadow:
    """Copies modules; tensors become ``meta``, or memory filled with what no initialiser leaves behind."""

    def __init__(self, wanted: set[str]) -> None:
        self.wanted = wanted
        self.made: dict[str, Tensor] = {}
        self.holders: set[nn.Module] = set()  # modules with something to initialise below them
        self._versions: dict[str, int] = {}
        self.counterparts: dict[int, nn.Module] = {}
        self._tied: dict[int, Tensor] = {}

    def of(self, module: nn.Module, path: str, tying: bool = True) -> nn.Module:
        if id(module) in self.counterparts:
            return self.counterparts[id(module)]
        kind = _plain_class(module)
        copied = self.counterparts[id(module)] = kind.__new__(kind)
        # hooks of FSDP and others belong to the module that they were put on
        state = {n: type(v)() if "_hooks" in n and isinstance(v, dict) else v for n, v in vars(module).items()}
        copied.__dict__.update(state)
        # transformers ties after it has initialised, everybody else before
        tying = tying and not _is_pretrained(module)
        prefix = f"{path}." if path else ""
        holds = False
        for store in ("_parameters", "_buffers"):
            own = {n: None if t is None else self._tensor(t, prefix + n, tying) for n, t in state[store].items()}
            copied.__dict__[store] = own
            holds |= any(t is not None and t.device.type == "cpu" for t in own.values())
        for name, value in state.items():
            if isinstance(value, Tensor):
                copied.__dict__[name] = made = self._tensor(value, prefix + name, tying)
                holds |= made.device.type == "cpu"
        children = {n: m and self.of(m, prefix + n, tying) for n, m in state["_modules"].items()}
        copied.__dict__["_modules"] = children
        if holds or any(m in self.holders for m in children.values()):
            self.holders.add(copied)
            copied.__dict__.pop("_is_hf_initialized", None)  # it was, on meta
        return copied

    def _tensor(self, tensor: Tensor, path: str, tying: bool) -> Tensor:
        if tying and id(tensor) in self._tied:
            made = self._tied[id(tensor)]
            if path in self.wanted:
                self.made[path] = made
            return made
        device = "cpu" if path in self.wanted else "meta"
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        if path in self.wanted:
            made.fill_(_sentinel(tensor.dtype))
            self.made[path], self._versions[path] = made, made._version
        self._tied[id(tensor)] = made
        return made

    def untouched(self, path: str) -> bool:
        tensor = self.made.get(path)
        if tensor is None:
            return True
        if tensor.is_floating_point() or tensor.is_complex():
            return bool(tensor.isnan().any())
        if tensor.dtype == torch.bool:
            return tensor._version == self._versions.get(path, 0)
        return tensor.numel() > 0 and bool((tensor == _sentinel(tensor.dtype)).all())


def _construct(module: nn.Module, holders: set[nn.Module]) -> None:
    if module not in holders:
        return
    for child in module.children():
        _construct(child, holders)
    _call_first(module, _ONE)
    if _is_pretrained(module):
        pretrained: Any = module
        pretrained.initialize_weights()  # passes over the models inside, which have done it
        return
    if _takes(module, "_init_weights", 1):
        module.apply(getattr(module, "_init_weights"))  # noqa: B009
    elif _takes(module, "_init_weights", 0):
        getattr(module, "_init_weights")()  # noqa: B009
    _call_first(module, _WHOLE)


def _call_first(module: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        if _takes(module, name, 0):
            getattr(module, name)()
            return


def _adapters(module: nn.Module, holders: set[nn.Module]) -> None:
    """Adapters begin as PEFT begins them; the model that they sit in would initialise them as layers of its own."""
    configs: dict[str, Any] = {}
    for inner in module.modules():
        configs.update(getattr(inner, "peft_config", None) or {})
    for inner in module.modules():
        reset = getattr(inner, "reset_lora_parameters", None)
        if inner in holders and callable(reset):
            for name in getattr(inner, "lora_A", ()):
                reset(name, getattr(configs.get(name), "init_lora_weights", True))


def _takes(module: nn.Module, name: str, count: int) -> bool:
    """Whether the module's class has a method of that name that can be called with ``count`` arguments."""
    method = getattr(type(module), name, None)
    if not callable(method):
        return False
    parameters = list(inspect.signature(method).parameters.values())[1:]
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == count


def _sentinel(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max - 1


def _is_pretrained(module: nn.Module) -> bool:
    return any(k.__name__ == "PreTrainedModel" for k in type(module).__mro__)


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)


def _owner_kind(module: nn.Module, path: str) -> str:
    return _plain_class(module.get_submodule(path.rpartition(".")[0])).__name__
