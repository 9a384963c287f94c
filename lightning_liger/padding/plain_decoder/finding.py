"""Which modules are decoders of their own making: they embed tokens, and hold blocks with attention in a list."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

import torch.nn as nn

_ATTENTION = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "softmax",
    "flex_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "memory_efficient_attention",
}


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Decoder:
    """A module whose ``forward`` turns token ids into hidden states, logits or a loss."""

    module: nn.Module
    embeddings: tuple[nn.Embedding, ...]
    blocks: tuple[nn.Module, ...]
    parts: tuple[nn.Module, ...]


def find_decoders(module: nn.Module) -> list[Decoder]:
    """The innermost modules with a ``forward``, a token table and a list of blocks, outside of transformers models."""
    foreign: set[nn.Module] = set()
    for inner in module.modules():
        if any(k.__name__ == "PreTrainedModel" for k in type(inner).__mro__):
            foreign.update(inner.modules())
    found: list[Decoder] = []
    taken: set[nn.Module] = set()
    attending: dict[nn.Module, bool] = {}
    # children come after their parents, so that the innermost is met first from behind
    for candidate in reversed(list(module.modules())):
        if candidate in foreign or not _has_forward(candidate):
            continue
        inside = [m for m in candidate.modules() if m not in foreign]
        if not taken.isdisjoint(inside):
            continue
        blocks = [b for m in inside if isinstance(m, _CONTAINERS) for b in m.children() if _is_block(b, attending)]
        in_blocks = {m for block in blocks for m in block.modules()}
        embeddings = tuple(m for m in inside if isinstance(m, nn.Embedding))
        if not blocks or candidate in in_blocks or in_blocks.issuperset(embeddings):
            continue
        taken.add(candidate)
        callable_blocks = tuple(dict.fromkeys(b for b in blocks if _has_forward(b)))
        parts = tuple(dict.fromkeys(p for b in blocks for p in _parts(b, attending)))
        found.append(Decoder(candidate, embeddings, callable_blocks, parts))
    return found[::-1]


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"


def _is_block(module: nn.Module, attending: dict[nn.Module, bool]) -> bool:
    """Whether it is made of several modules, and attends."""
    if not list(module.children()):
        return False
    for inner in module.modules():
        if inner not in attending:
            attending[inner] = attends(inner)
    return any(attending[m] for m in module.modules())


def _parts(module: nn.Module, attending: dict[nn.Module, bool]) -> Iterator[nn.Module]:
    """The largest modules inside that do not attend, but for PyTorch's own, which are one operator each."""
    for child in module.children():
        if any(attending[m] for m in child.modules()):
            yield from _parts(child, attending)
        elif _has_forward(child) and (list(child.children()) or not type(child).__module__.startswith("torch.")):
            yield child
        elif not _has_forward(child):
            yield from _parts(child, attending)


def attends(module: nn.Module) -> bool:
    if isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
        return True
    return any(_ATTENTION & set(names(f.__code__)) for f in functions(module))


def functions(module: nn.Module) -> Iterator[FunctionType]:
    """The methods of the module's class below ``nn.Module``, functions it holds, and those that they call by name."""
    members = [v for klass in type(module).__mro__ if klass not in nn.Module.__mro__ for v in vars(klass).values()]
    for member in (*members, *vars(module).values()):
        function = inspect.unwrap(member) if callable(member) else None
        if not isinstance(function, FunctionType) or function.__module__.startswith("torch."):
            continue
        yield function
        yield from _helpers(function)


def _helpers(function: FunctionType) -> Iterator[FunctionType]:
    """Functions beside it that it calls: by name, as an attribute of a module, or from its closure."""
    called = set(names(function.__code__))
    beside = [function.__globals__[name] for name in called if name in function.__globals__]
    for module in [m for m in beside if isinstance(m, ModuleType) and not m.__name__.startswith("torch")]:
        beside += [vars(module)[name] for name in called if name in vars(module)]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            beside.append(cell.cell_contents)
    yield from (f for f in beside if isinstance(f, FunctionType))


def names(code: CodeType) -> list[str]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return [*code.co_names, *(n for c in inner for n in names(c))]
