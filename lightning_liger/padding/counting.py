"""Tokens of a backbone call, counted on the CPU whether its padding is removed or not."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.mirrored import cpu_values, ordinary
from lightning_liger.patching import Rebound, Switch
from lightning_liger.report import PaddingReport


def count_call(report: PaddingReport, call: dict[str, Any], model: nn.Module) -> None:
    """Count the positions of one call of ``model`` and, where its mask is known on the CPU, how many of them are padding."""
    tokens = call.get("input_ids")
    tokens = call.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return
    report.seen((tokens.shape[0], tokens.shape[1]), model)
    mask = call.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == tokens.shape[:2]:
        values = cpu_values(mask)
        if values is not None:
            lengths = tuple(int(n) for n in (values != 0).sum(1).tolist())
            report.real(sum(lengths), lengths)


class CountedBackbone(Rebound):
    """``forward`` of a backbone whose padding stays: nothing but the counters changes."""

    def __init__(self, module: nn.Module, switch: Switch, report: PaddingReport) -> None:
        super().__init__(module, switch)
        self.report = report
        self._names = tuple(inspect.signature(type(module).forward).parameters)[1:]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            count_call(self.report, {**dict(zip(self._names, args, strict=False)), **kwargs}, self.module)
        args, kwargs = ordinary((args, kwargs))
        return self.original(*args, **kwargs)
