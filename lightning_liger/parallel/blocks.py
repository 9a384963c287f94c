"""Which submodules are the repeated blocks that FSDP gathers and frees one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule


def find_blocks(module: nn.Module, whole: Collection[nn.Module] = ()) -> dict[str, nn.Module]:
    """The outermost like entries of lists of modules: decoder layers, encoder layers, stages of a vision tower.

    Neither architecture nor library needs to be known: a block is a module with submodules and a ``forward`` of its own
    that stands in a list beside at least one other of its class. Experts inside a block, and lists of whole models, are
    not blocks, and neither are classes that transformers counts among ``_no_split_modules`` without repeating them.

    Args:
        module: where to look.
        whole: modules whose parameters are read outside of their own forward, such as a head with a lazy loss; whatever
            holds one of them is no block.

    Returns:
        path -> block, in the order of ``named_modules()``. Blocks that share a parameter with anything else are left
        out, because one parameter can be in one group only; so is what is sharded already, with all that it holds.
    """
    candidates = dict(_walk(module, "", set(whole)))
    sharing = _sharing(module, candidates)
    return {name: block for name, block in candidates.items() if name not in sharing}


def chooses_submodules(block: nn.Module) -> bool:
    """Whether a block holds like modules of which each token takes some (experts): ranks may then use different ones."""
    lists = (m for m in block.modules() if isinstance(m, nn.ModuleList))
    return any(classes.count(classes[0]) > 1 for m in lists if (classes := [type(e) for e in m]))


def _walk(module: nn.Module, path: str, whole: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    blocks = _like_entries(module, whole) if isinstance(module, (nn.ModuleList, nn.Sequential)) else set()
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, FSDPModule):
            continue
        if child in blocks:
            yield where, child
        else:
            yield from _walk(child, where, whole)


def _like_entries(modules: nn.Module, whole: set[nn.Module]) -> set[nn.Module]:
    entries = [m for m in modules.children() if _can_be_a_block(m, whole)]
    classes = [type(m) for m in entries]
    return {m for m in entries if classes.count(type(m)) > 1}


def _can_be_a_block(module: nn.Module, whole: set[nn.Module]) -> bool:
    inside = set(module.modules())
    return (
        any(True for _ in module.children())
        and type(module).forward not in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
        and any(True for _ in module.parameters())
        and not inside & whole
        and not any(isinstance(m, FSDPModule) for m in inside)
        and not _is_a_model(module)
    )


def _is_a_model(module: nn.Module) -> bool:
    """Whether an entry of a list is a whole model (an ensemble, a policy and its reference) with blocks of its own."""
    inside = list(module.modules())
    if any(k.__name__ == "PreTrainedModel" for m in inside for k in type(m).__mro__):
        return True
    embeds = any(isinstance(m, nn.Embedding) for m in inside)
    lists = (m for m in inside if isinstance(m, (nn.ModuleList, nn.Sequential)) and m is not module)
    return embeds and any(_like_entries(m, set()) for m in lists)


def _sharing(module: nn.Module, blocks: Mapping[str, nn.Module]) -> set[str]:
    """The blocks that share a parameter with another block or with what is in none."""
    owner: dict[nn.Module, str] = {m: name for name, block in blocks.items() for m in block.modules()}
    users: dict[nn.Parameter, set[str]] = {}
    for inner in module.modules():
        for parameter in inner.parameters(recurse=False):
            users.setdefault(parameter, set()).add(owner.get(inner, ""))
    return {name for names in users.values() if len(names) > 1 for name in names}
