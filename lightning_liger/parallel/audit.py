"""Whether all that trains is managed, and which dtypes are stored, computed and reduced."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_liger.parallel.groups import parameters_of, policy, sharded_parts
from lightning_liger.parallel.mesh import SHARD
from lightning_liger.parallel.shard import Sharding

_TOO_LATE = (
    "Hooks from on_fit_start on come too late to resize, rebuild or load a model under liger_fsdp: its parameters are "
    "sharded by then. Do it in __init__, setup or configure_model of the LightningModule."
)


def check_managed(module: nn.Module, sharding: Sharding) -> None:
    """Every parameter is in a group, or is averaged by itself.

    Raises:
        RuntimeError: a parameter was added or replaced after sharding, for example by ``resize_token_embeddings`` in
            ``on_fit_start``; each rank would train it on its own data alone.
    """
    known = {id(p) for p in sharding.whole.values()}
    stray = [n for n, p in module.named_parameters() if not isinstance(p, DTensor) and id(p) not in known]
    if stray:
        names = ", ".join(stray[:3]) + (", ..." if len(stray) > 3 else "")
        raise RuntimeError(
            f"{len(stray)} parameters were added or replaced after the strategy sharded the module: {names}. {_TOO_LATE}"
        )


def explain_mixture(exception: BaseException) -> None:
    """Add to PyTorch's errors about operations on sharded parameters where those come from."""
    if isinstance(exception, RuntimeError) and "data is not allocated yet" in str(exception):
        exception.args = (
            f"{exception}\nParameters and gradients are sharded, and so are sums and norms of them: take .full_tensor() "
            "of one, or lightning_liger.grad_norm(module) in place of Lightning's.",
        )
    if isinstance(exception, RuntimeError) and any(w in str(exception) for w in ("DTensor", "sharding strategy")):
        exception.args = (
            f"{exception}\nA parameter that the strategy had sharded was used outside of a forward. {_TOO_LATE} Copies of "
            "weights that the module keeps itself, such as a moving average, are not sharded along: use Lightning's "
            "EMAWeightAveraging, which is.",
        )


@dataclass(frozen=True)
class ShardingReport:
    """What the strategy did, for the report.

    Attributes:
        groups: number of blocks that are gathered one by one; the root is one more.
        ranks: over how many ranks each parameter is spread. copies: how many whole models that makes.
        stored: dtype -> number of parameters (of the whole model) that train. frozen: the same for those that do not.
        compute: dtypes that the groups compute in. reduce: dtypes that gradients are reduced in.
        foreign: groups that the user's code had made; they keep their own dtypes.
    """

    groups: int
    ranks: int
    copies: int
    stored: dict[str, int]
    frozen: dict[str, int]
    compute: list[str]
    reduce: list[str]
    foreign: int = 0

    def row(self) -> tuple[str, str, str]:
        spread = f"{self.groups} blocks and the root, each over {self.ranks} rank{'' if self.ranks == 1 else 's'}"
        if self.copies > 1:
            spread += f", {self.copies} copies"
        if self.foreign:
            spread += f"; {self.foreign} groups by the module itself"
        stored = ", ".join(f"{d} masters ({_count(n)})" for d, n in self.stored.items())
        frozen = "".join(f", {d} frozen ({_count(n)})" for d, n in self.frozen.items())
        dtypes = f"{stored}{frozen}; compute {', '.join(self.compute)}; reduce {', '.join(self.reduce)}"
        return "Sharding (FSDP2)", spread, dtypes


def audit(module: nn.Module, sharding: Sharding, mesh: DeviceMesh) -> ShardingReport:
    """Read from FSDP's groups which dtypes they store, compute and reduce in, whoever made them."""
    stored: Counter[str] = Counter()
    frozen: Counter[str] = Counter()
    for parameter in module.parameters():
        (stored if parameter.requires_grad else frozen)[_name(parameter.dtype)] += parameter.numel()
    compute: dict[str, None] = {}
    reduce: dict[str, None] = {}
    for part in sharded_parts(module):
        for parameter in parameters_of(part):
            chosen = policy(part)
            computed = chosen.param_dtype or parameter.sharded_param.dtype
            compute[_name(computed)] = None
            if parameter.sharded_param.requires_grad:
                reduce[_name(chosen.reduce_dtype or computed)] = None
    shards = mesh[SHARD].size() if mesh.ndim > 1 else mesh.size()
    return ShardingReport(
        groups=len(sharding.blocks),
        ranks=shards,
        copies=mesh.size() // shards,
        stored=dict(stored),
        frozen=dict(frozen),
        compute=list(compute),
        reduce=list(reduce),
        foreign=len(sharding.found),
    )


def _name(dtype: torch.dtype) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}.get(
        text := str(dtype).removeprefix("torch."), text
    )


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
