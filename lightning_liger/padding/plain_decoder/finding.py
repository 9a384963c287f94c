"""Which modules are decoders of their own making: they embed tokens, and hold a stack of like blocks with attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType

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


@dataclass(frozen=True)
class Decoder:
    """A module whose ``forward`` turns token ids into hidden states, logits or a loss."""

    module: nn.Module
    embeddings: tuple[nn.Embedding, ...]
    blocks: tuple[nn.Module, ...]


def find_decoders(module: nn.Module) -> list[Decoder]:
    """The innermost modules with a ``forward``, a token table and a stack of blocks, outside of transformers models."""
    foreign: set[nn.Module] = set()
    for inner in module.modules():
        if any(k.__name__ == "PreTrainedModel" for k in type(inner).__mro__):
            foreign.update(inner.modules())
    found: list[Decoder] = []
    taken: set[nn.Module] = set()
    # children come after their parents, so that the innermost is met first from behind
    for candidate in reversed(list(module.modules())):
        if candidate in foreign or not _has_forward(candidate) or taken & set(candidate.modules()):
            continue
        inside = [m for m in candidate.modules() if m not in foreign]
        stacks = [m for m in inside if _is_stack(m)]
        in_blocks = {m for stack in stacks for m in stack.modules()}
        in_blocks = in_blocks if not _is_stack(candidate) else set()
        embeddings = tuple(m for m in inside if isinstance(m, nn.Embedding) and m not in in_blocks)
        if not stacks or not embeddings or candidate in stacks:
            continue
        if not any(_attends(m) for stack in stacks for m in stack.modules()):
            continue
        taken.add(candidate)
        every = tuple(m for m in inside if isinstance(m, nn.Embedding))
        found.append(Decoder(candidate, every, tuple(dict.fromkeys(b for s in stacks for b in s.children()))))
    return found[::-1]


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"


def _is_stack(module: nn.Module) -> bool:
    """A list of one kind of block, each with several matrices."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return False
    children = list(module.children())
    if not children or len({type(c) for c in children}) != 1 or not list(children[0].children()):
        return False
    return all(sum(p.dim() >= 2 for p in c.parameters()) >= 3 for c in children)


def _attends(module: nn.Module) -> bool:
    if isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
        return True
    return any(_ATTENTION & set(names(f.__code__)) for f in _functions(module))


def _functions(module: nn.Module) -> Iterator[FunctionType]:
    """The methods of the module's class below ``nn.Module``, functions it holds, and those that they call."""
    members = [v for klass in type(module).__mro__ if klass not in nn.Module.__mro__ for v in vars(klass).values()]
    for member in (*members, *vars(module).values()):
        function = inspect.unwrap(member) if callable(member) else None
        if not isinstance(function, FunctionType) or function.__module__.startswith("torch."):
            continue
        yield function
        for name in names(function.__code__):
            helper = function.__globals__.get(name)
            if isinstance(helper, FunctionType):
                yield helper


def names(code: CodeType) -> list[str]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return [*code.co_names, *(n for c in inner for n in names(c))]
