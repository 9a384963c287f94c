"""Calls in which each row of the batch has an adapter, or a place where its adapter begins, of its own.

PEFT tells its layers about rows by hooks that it registers for one call (``adapter_names=``, activated LoRA). Without
padding there is one row of documents, to which none of that applies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.nn as nn

from lightning_liger.patching import Rebound, Switch, bypass
from lightning_liger.report import PaddingReport

_ARGUMENTS = {
    "adapter_names": "adapter_names= gives each row an adapter of its own",
    "alora_offsets": "an activated LoRA begins at another token of each row",
}


class PerRowAdapters(Rebound):
    """What a ``PeftModel`` enters around its forward."""

    name = "_enable_peft_forward_hooks"

    def __init__(self, module: nn.Module, switch: Switch, report: PaddingReport) -> None:
        super().__init__(module, switch)
        self.report = report

    def call(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        reason = next((why for name, why in _ARGUMENTS.items() if kwargs.get(name) is not None), None)
        return self.original(*args, **kwargs) if reason is None else self._padded(reason, *args, **kwargs)

    @contextmanager
    def _padded(self, reason: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        self.report.left_padded(reason)
        with bypass(reason), self.original(*args, **kwargs):
            yield
