"""The bf16 policy: which dtype parameters are stored, computed and reduced in, for each ``Trainer(precision=...)``."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from lightning_liger.parallel.clipping import clip_grad_norm, clip_grad_value

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
    from torch.distributed.fsdp import MixedPrecisionPolicy
else:
    _Base = object

REMEDY = (
    "Use Trainer(precision='32-true') or 'bf16-mixed' (fp32 master weights, bf16 compute), 'bf16-true' (bf16 weights), "
    "or LigerFSDPStrategy(bf16=False) with '32-true' for fp32 throughout."
)


@dataclass(frozen=True)
class DTypes:
    """Where each dtype is used.

    Args:
        master: dtype that trainable parameters, and with them the optimizer's state, are stored in; None leaves them.
        compute: dtype of parameters while they take part in forward and backward; None computes in the stored one.
        reduce: dtype of gradients while they are summed over ranks.
        name: what ``trainer.precision`` says.
        notice: one line for the user when this is not literally what was asked for.
    """

    master: torch.dtype | None
    compute: torch.dtype | None
    reduce: torch.dtype
    name: str
    notice: str = ""

    def following(self, foreign: set[torch.dtype]) -> DTypes:
        """The policy for the rest of a module that computes a part of itself in ``foreign`` dtypes already."""
        if len(foreign) != 1 or foreign == {self.compute or self.master or torch.float32}:
            return self
        (dtype,) = foreign
        name = str(dtype).removeprefix("torch.")
        return replace(
            self,
            compute=None if dtype == self.master else dtype,
            notice=f"the module shards a part of itself, to compute in {name}; so does the rest",
        )

    def policy(self, *, cast_inputs: bool) -> MixedPrecisionPolicy:
        """FSDP2's form of it; ``cast_inputs`` casts floating inputs of a sharded module to the compute dtype."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(
            param_dtype=self.compute, reduce_dtype=self.reduce, cast_forward_inputs=cast_inputs and bool(self.compute)
        )


def dtypes_for(precision: str, *, bf16: bool) -> DTypes:
    """The policy for a value of ``Trainer(precision=...)``.

    Args:
        precision: as Lightning spells it after normalisation, such as ``"32-true"``.
        bf16: compute in bf16 where Lightning's default would compute in fp32.

    Raises:
        ValueError: fp16, fp64 and quantised precisions, naming the option and what to use.
    """
    mixed = DTypes(torch.float32, torch.bfloat16, torch.float32, "bf16-mixed")
    if precision == "32-true" and bf16:
        notice = (
            "precision='32-true' computes in bf16 with fp32 master weights, gradients reduced in fp32, and fp32 optimizer "
            "state under liger_fsdp; LigerFSDPStrategy(bf16=False) computes in fp32"
        )
        return DTypes(mixed.master, mixed.compute, mixed.reduce, mixed.name, notice)
    if precision == "32-true":
        return DTypes(None, None, torch.float32, precision)
    if precision == "bf16-mixed":
        return mixed
    if precision == "bf16-true":
        return DTypes(torch.bfloat16, None, torch.float32, precision)
    raise ValueError(f"precision={precision!r} does not fit the liger_fsdp strategy, which scales no loss. {REMEDY}")


def dtypes_of(plugin: Any, *, bf16: bool) -> DTypes:
    """The policy in place of one of Lightning's own precision plugins.

    Raises:
        ValueError: as :func:`dtypes_for`; also for plugins that do more than choose dtypes (quantisation, the user's own).
    """
    if type(plugin).__name__ not in (
        "Precision",
        "MixedPrecision",
        "HalfPrecision",
        "DoublePrecision",
        "FSDPPrecision",
    ):
        raise ValueError(
            f"{type(plugin).__name__} does not fit the liger_fsdp strategy, which stores and computes by a policy of its "
            f"own. {REMEDY}"
        )
    return dtypes_for(str(plugin.precision), bf16=bf16)


def store_parameters(module: nn.Module, dtypes: DTypes) -> int:
    """Cast trainable parameters to the master dtype; with ``bf16-true`` frozen ones too. Buffers keep theirs.

    Frozen parameters need no master copy: they stay in the dtype that they were loaded in.

    Returns:
        how many parameters changed their dtype.
    """
    changed = 0
    if dtypes.master is None:
        return changed
    for parameter in module.parameters():
        if not parameter.is_floating_point() or parameter.dtype == dtypes.master:
            continue
        if parameter.requires_grad or dtypes.master == torch.bfloat16:
            parameter.data = parameter.data.to(dtypes.master)
            changed += 1
    return changed


class _Clipping:
    """No autocast, no casts of the batch, and true global norms."""

    def __init__(self, dtypes: DTypes) -> None:
        super().__init__()
        self.liger_dtypes = dtypes
        self.precision = dtypes.name

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        clip_grad_norm(self.main_params(optimizer), clip_val)  # type: ignore[attr-defined]

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        clip_grad_value(self.main_params(optimizer), clip_val)  # type: ignore[attr-defined]


@functools.cache
def precision_class(base: type) -> Any:
    """Lightning's side of the policy; ``base`` is the ``Precision`` class of the Trainer's tree."""
    return type("LigerPrecision", (_Clipping, base), {"__module__": __name__})


class PolicyPrecision(_Base):
    """The part of a Lightning strategy that holds the policy, whatever precision plugin it is given."""

    def init_precision(self, tree: str, bf16: bool) -> None:
        """Take the options; before Lightning's own ``__init__``, which assigns a plugin."""
        self._precision_class = precision_class(importlib.import_module(f"{tree}.plugins.precision").Precision)
        self._bf16 = bf16

    @property
    def precision_plugin(self) -> Any:
        plugin = self._precision_plugin
        return plugin if plugin is not None else self._precision_class(dtypes_for("32-true", bf16=self._bf16))

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        # Lightning chooses its own plugin from Trainer(precision=...) after the strategy has been made
        if plugin is None or hasattr(plugin, "liger_dtypes"):
            self._precision_plugin = plugin
        else:
            self._precision_plugin = self._precision_class(dtypes_of(plugin, bf16=self._bf16))
