"""Which modules are MLPs that treat every token by itself: by structure, and by a comparison."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.kernels.registry import signature
from lightning_liger.kernels.standin import defined_by, features, stand_in, tiny_linear
from lightning_liger.kernels.surroundings import undisturbed
from lightning_liger.parallel.blocks import find_blocks
from lightning_liger.patching import bypass

_EXPERTS = "mixture of experts: how many tokens an expert gets depends on all of them"
_TOLERANCE = 1e-6
_TOKENS = 6


def find_mlps(module: nn.Module, seen: Collection[nn.Module] = ()) -> tuple[list[nn.Module], list[str]]:
    """MLPs inside of the repeated blocks of ``module``, and reasons for those that must stay whole.

    Args:
        seen: blocks that were looked at before.
    """
    suited: list[nn.Module] = []
    refused: dict[str, None] = {}
    verdicts: dict[object, str] = {}
    for block in find_blocks(module).values():
        if block in seen:
            continue
        for found, reason in _candidates(block):
            if not reason:
                key = signature(found, without=layers_of(found)), tuple(layers_of(found).items())
                if key not in verdicts:
                    verdicts[key] = why_not(found)
                reason = verdicts[key]
            if not reason:
                suited.append(found)
            elif reason == _EXPERTS or _is_named(found):
                refused[f"{defined_by(found).__name__}: {reason}"] = None
    return suited, list(refused)


def layers_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """``(in, out)`` of the layers among a module's children."""
    found = {n: features(c) for n, c in module._modules.items() if c is not None}
    return {n: f for n, f in found.items() if f is not None}


def _candidates(parent: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """``(module, reason against it)``, the outermost ones."""
    for child in parent.children():
        if _holds_experts(child):
            yield child, _EXPERTS
            yield from _beside_experts(child)
        elif _has_the_shape(child):
            yield child, ""
        else:
            yield from _candidates(child)


def _holds_experts(module: nn.Module) -> bool:
    """Whether some of its children, or slices of its parameters, are for some of the tokens."""
    parts = [m for m in (module, *module.children()) if not isinstance(m, nn.Sequential)]
    if any(p is not None and p.dim() == 3 for m in parts for p in m._parameters.values()):
        return True
    lists = [m for m in parts if isinstance(m, (nn.ModuleList, nn.ModuleDict))]
    return any(len(kinds) > len(set(kinds)) for m in lists if (kinds := [type(c) for c in m.children()]))


def _beside_experts(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """What sees every token all the same: shared experts."""
    for child in module.children():
        if not isinstance(child, (nn.ModuleList, nn.ModuleDict)) and not _holds_experts(child):
            if _has_the_shape(child):
                yield child, ""
            else:
                yield from _candidates(child)


def _has_the_shape(module: nn.Module) -> bool:
    """A layer that widens, and one that narrows what came out of it, or half of that, to where it began."""
    sizes = layers_of(module).values()
    return any(
        wide > narrow and a == narrow and b in (wide, 2 * wide)
        for (a, b), (wide, narrow) in itertools.permutations(sizes, 2)
    )


def _is_named(module: nn.Module) -> bool:
    name = defined_by(module).__name__.lower()
    return any(word in name for word in ("mlp", "feedforward", "feed_forward", "ffn", "dense"))


def why_not(module: nn.Module) -> str:
    """Why ``module`` must see all of its tokens at once, or ``""``; asked of a small one of its kind."""
    with undisturbed(), bypass("comparing MLPs"):
        try:
            trial, width = small(module)
            x = torch.randn(2, _TOKENS, width)
            forward = type(trial).forward
            whole, again = forward(trial, x), forward(trial, x)
            if not isinstance(whole, Tensor) or whole.shape[:-1] != x.shape[:-1]:
                return "gives something else than one vector for each token"
            if not torch.equal(whole, again):
                return "gives another result each time"
            rows = x.reshape(1, -1, width)
            parts = torch.cat([forward(trial, part) for part in rows.split(5, dim=1)], dim=1).reshape(whole.shape)
            changed = x.clone()
            changed[:, 2] = torch.randn(2, width)
            others = [i for i in range(_TOKENS) if i != 2]
            if _differ(forward(trial, changed)[:, others], whole[:, others]) or _differ(parts, whole):
                return "a token's result depends on other tokens"
        except Exception as error:  # any code of the module's own: what cannot be asked is left alone
            text = str(error).splitlines()[0] if str(error) else ""
            return f"its own code could not be run for the comparison ({type(error).__name__}: {text})"[:240]
    return ""


def _differ(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or not bool(((a - b).norm() <= _TOLERANCE * b.norm()).item())


def small(module: nn.Module) -> tuple[nn.Module, int]:
    """One of the same class with few random parameters, without dropout; and the width of what it takes."""
    layers = layers_of(module)
    sizes = _smaller({size for pair in layers.values() for size in pair})
    cpu = torch.device("cpu")
    children: dict[str, nn.Module] = {}
    for name, child in module._modules.items():
        if child is None:
            continue
        if name in layers:
            inside, outside = layers[name]
            children[name] = tiny_linear(child, sizes[inside], sizes[outside], cpu)
        else:
            children[name] = _small_child(child, sizes)
    made = stand_in(module, _small_parameters(module, sizes), children, sizes)
    made.training = False
    entry = next(a for (a, b), (wide, narrow) in itertools.permutations(layers.values(), 2) if a == narrow and wide > a)
    return made, sizes[entry]


def _small_child(child: nn.Module, sizes: Mapping[int, int]) -> nn.Module:
    if any(True for _ in child.buffers()):
        raise ValueError(f"{type(child).__name__} holds buffers")
    if not any(True for _ in child.parameters()):
        return copy.deepcopy(child).eval()
    inner = {n: _small_child(c, sizes) for n, c in child._modules.items() if c is not None}
    made: Any = stand_in(child, _small_parameters(child, sizes), inner, sizes)
    for name, value in vars(made).items():
        if isinstance(value, tuple) and value and all(isinstance(v, int) for v in value):
            vars(made)[name] = tuple(sizes.get(v, v) for v in value)  # normalized_shape
    made.training = False
    return made


def _small_parameters(module: nn.Module, sizes: Mapping[int, int]) -> dict[str, Tensor | None]:
    """Vectors of a known length and scalars; whatever else there is would have to be understood first."""
    made: dict[str, Tensor | None] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and (parameter.dim() > 1 or any(s not in sizes and s != 1 for s in parameter.shape)):
            raise ValueError(f"parameter {name} belongs to no layer")
        made[name] = None if parameter is None else torch.randn([sizes.get(s, s) for s in parameter.shape])
    return made


def _smaller(sizes: set[int]) -> dict[int, int]:
    """The same proportions in small numbers, where the sizes have a common factor."""
    factor = math.gcd(*sizes)
    unit = 8 if factor > 8 and max(sizes) // factor * 8 <= 4096 else factor
    return {size: size // factor * unit for size in sizes}
