"""Which modules can have the tokens of a batch divided among ranks, and the report's line about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from lightning_liger.configs import config_value
from lightning_liger.padding.backbones import find_backbones
from lightning_liger.padding.plain_decoder.finding import find_decoders
from lightning_liger.parallel.ulysses import repeats
from lightning_liger.report import PaddingReport
from lightning_liger.settings import Settings


@dataclass(frozen=True)
class SequenceReport:
    """What is divided, and how.

    Attributes:
        ranks: that share a batch. groups: of such ranks, each with a batch of its own.
        heads: attention heads of each backbone, ``(query, key and value)``.
    """

    ranks: int
    groups: int
    heads: dict[str, tuple[int, int]]

    def row(self) -> tuple[str, str, str]:
        batches = f"{self.groups} batch{'' if self.groups == 1 else 'es'} on {self.groups * self.ranks} ranks"
        heads = "; ".join(
            f"{name}: attention has {query // self.ranks} of {query} heads a rank, {_kv(kv, self.ranks)}"
            for name, (query, kv) in self.heads.items()
        )
        return "Sequence parallel", batches, f"each batch's tokens and head rows in {self.ranks} slices; {heads}"


def _kv(heads: int, ranks: int) -> str:
    return f"{math.lcm(heads, ranks) // ranks} of {heads} of keys and values{', repeated' if heads % ranks else ''}"


def check_settings(settings: Settings, sequence_parallel_size: int) -> None:
    """
    Raises:
        ValueError: an option of the callback that leaves nothing to divide.
    """
    if sequence_parallel_size > 1 and not settings.padding_free:
        raise ValueError(
            f"sequence_parallel_size={sequence_parallel_size} divides batches whose padding is removed, but "
            "padding_free=False. Drop one of the two."
        )


def check_divisible(module: nn.Module, padding: PaddingReport, ranks: int, groups: int) -> SequenceReport:
    """
    Args:
        module: accelerated. padding: what that says of its padding.

    Raises:
        ValueError: a backbone whose tokens or heads cannot be divided by ``ranks``.
    """
    option = f"sequence_parallel_size={ranks}"
    backbones, refused = find_backbones(module)
    plain = [type(d.module).__name__ for d in find_decoders(module)]
    if plain:
        raise ValueError(
            f"{option} divides the tokens of transformers models, and {plain[0]} is none: its attention cannot be replaced. "
            "Use sequence_parallel_size=1."
        )
    heads: dict[str, tuple[int, int]] = {}
    for backbone in backbones:
        name, (query, kv) = type(backbone).__name__, head_counts(backbone)
        if not _divides(ranks, query, kv):
            fitting = ", ".join(str(k) for k in range(1, query + 1) if _divides(k, query, kv))
            raise ValueError(
                f"{option} divides the attention heads among ranks, and {name} has {query}, with {kv} of keys and values. "
                f"Use one of {fitting}."
            )
        heads[name] = query, kv
    if refused or padding.applied < padding.found or not backbones:
        why = "; ".join(padding.off) or "no transformers model was found in the module"
        raise ValueError(
            f"{option} divides the packed tokens of a batch, and padding cannot be removed here: {why}. Use "
            "sequence_parallel_size=1."
        )
    return SequenceReport(ranks, groups, heads)


def larger_sizes(module: nn.Module, size: int, copy: int) -> tuple[int, ...]:
    """Multiples of ``sequence_parallel_size=size`` that divide the heads, and the ``copy`` ranks of one model."""
    backbones, refused = find_backbones(module)
    if refused or not backbones or find_decoders(module):
        return ()
    heads = [head_counts(backbone) for backbone in backbones]
    sizes = range(2 * size, copy + 1, size)
    return tuple(k for k in sizes if copy % k == 0 and all(_divides(k, *counts) for counts in heads))


def _divides(size: int, query: int, kv: int) -> bool:
    return repeats(query, kv, size) is not None


def head_counts(backbone: Any) -> tuple[int, int]:
    """``(query heads, key and value heads)``, by the configuration."""
    query = config_value(backbone.config, "num_attention_heads")
    kv = config_value(backbone.config, "num_key_value_heads")
    query = query if isinstance(query, int) and query > 0 else 1
    return query, kv if isinstance(kv, int) and kv > 0 else query
