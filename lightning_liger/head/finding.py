"""Which linear layers are language-model heads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.nn as nn

# Tables with as many rows as the context is long, or as there are segments, say nothing about a vocabulary.
_NOT_TOKENS = re.compile(r"pos|wpe|type|segment|time|layer|speaker|lang", re.IGNORECASE)
_FEWEST_ENTRIES = 16
# Hooks that gather weights; they change no value.
_OUR_HOOKS = ("torch.distributed.", "deepspeed.", "lightning_liger.")


def find_heads(module: nn.Module, named: str | None) -> tuple[list[nn.Linear], list[str]]:
    """The heads to fuse, and why other candidates are not.

    Args:
        named: path given by the user; then only this one is taken.

    Raises:
        ValueError: ``named`` does not lead to an ``nn.Linear``.
    """
    if named is not None:
        try:
            chosen = module.get_submodule(named)
        except AttributeError as error:
            raise ValueError(f"head={named!r}: the module has no such submodule ({error}).") from None
        if not isinstance(chosen, nn.Linear):
            raise ValueError(f"head={named!r} is a {type(chosen).__name__}; it must be an nn.Linear.")
        return [chosen], []
    found: dict[nn.Module, None] = {}
    refused: list[str] = []
    inside: set[nn.Module] = set()
    for model in module.modules():
        if not any(k.__name__ == "PreTrainedModel" for k in type(model).__mro__):
            continue
        inside.update(m for m in model.modules() if m is not model)
        head = _output_embeddings(model)
        if head is None:
            continue
        for part in _projections(head):
            reason = _refusal(part)
            if reason is None:
                found[part] = None
            elif reason not in refused:
                refused.append(reason)
    for head in _by_shape(module, inside):
        found.setdefault(head)
    return list(found), refused  # type: ignore[arg-type]


def _projections(head: nn.Module) -> Iterator[nn.Module]:
    """The linear layers that make up a head: itself, or what an adapter put in its place.

    PEFT computes ``base_layer(x) + lora_B(lora_A(x)) * scaling``: with both projections lazy, so is their sum, and no
    adapter, merged, disabled or of another kind, is ever passed over.
    """
    base, saved = getattr(head, "base_layer", None), getattr(head, "modules_to_save", None)
    tokens = getattr(head, "token_adapter", None)
    if isinstance(tokens, nn.Module):
        yield from _projections(tokens.base_layer)  # type: ignore[arg-type]
        yield tokens
    elif isinstance(base, nn.Module):
        yield from _projections(base)
        adapters = getattr(head, "lora_B", None)
        if isinstance(adapters, nn.ModuleDict):
            yield from adapters.values()
    elif isinstance(saved, nn.ModuleDict):
        for copy in (getattr(head, "original_module", None), *saved.values()):
            if isinstance(copy, nn.Module):
                yield from _projections(copy)
    else:
        yield head


def _output_embeddings(model: Any) -> nn.Module | None:
    try:
        head = model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return head if isinstance(head, nn.Module) else None


def _refusal(head: nn.Module) -> str | None:
    if not _is_linear(head) and not trains_tokens(head):
        return f"the head is a {type(head).__module__}.{type(head).__name__}, whose own computation must be kept"
    hooks = [*head._forward_hooks.values(), *head._forward_pre_hooks.values()]
    if any(not str(getattr(hook, "__module__", "")).startswith(_OUR_HOOKS) for hook in hooks):
        return "the head carries forward hooks of its own"
    return None


def trains_tokens(module: nn.Module) -> bool:
    """PEFT's layer that trains single rows of a weight, around an ``nn.Linear``."""
    base = module._modules.get("base_layer")
    return type(module).__name__ == "TrainableTokensLayer" and base is not None and _is_linear(base)


def _is_linear(module: nn.Module) -> bool:
    """An ``nn.Linear`` itself, also after ``fully_shard`` has given it a class of its own."""
    kinds = type(module).__mro__
    return type(module) is nn.Linear or (kinds[1].__name__ == "FSDPModule" and kinds[2] is nn.Linear)


def _by_shape(module: nn.Module, known: set[nn.Module]) -> list[nn.Linear]:
    """Heads outside of transformers models: tied to an embedding, or the one projection onto a token table's rows.

    A wrong guess costs nothing but a line in the report: logits that no loss reads are computed as usual.
    """
    tables = {n: m for n, m in module.named_modules() if isinstance(m, nn.Embedding) and m not in known}
    linears = {n: m for n, m in module.named_modules() if _is_linear(m) and m not in known}
    weights = {id(e.weight) for e in tables.values()}
    tied = [m for m in linears.values() if id(m.weight) in weights]
    if tied:
        return tied
    shapes = {
        (e.num_embeddings, e.embedding_dim)
        for n, e in tables.items()
        if e.num_embeddings >= _FEWEST_ENTRIES and not _NOT_TOKENS.search(n.rsplit(".", 1)[-1])
    }
    fitting = {n: m for n, m in linears.items() if (m.out_features, m.in_features) in shapes}
    # An inner layer of the same shape (4 * width entries) stands in every block, a head once and outside of them.
    times = Counter((m.out_features, m.in_features) for m in fitting.values())
    outside = [m for n, m in fitting.items() if not _in_a_block(n)]
    alone = [m for m in fitting.values() if times[(m.out_features, m.in_features)] == 1]
    return (outside or alone)[-1:]


def _in_a_block(name: str) -> bool:
    """Whether a path leads through a numbered container of its own: ``blocks.3.mlp.up``."""
    return any(part.isdigit() for part in name.split(".")[:-1])
