"""How many bytes of tensors are alive, now and at most, on devices whose allocator does not say."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

from torch import Tensor

from lightning_liger.bench.long.counted import CountedMemory


class Live(CountedMemory):
    """Counts what operators make inside of it, without a bound."""

    def __init__(self) -> None:
        super().__init__(sys.maxsize)


def memory_after(forward: Callable[[], Tensor]) -> int:
    """Bytes that live on for the backward of what ``forward`` returns."""
    with Live() as live:
        output = forward()
        graph = output.grad_fn
        del output
        gc.collect()
        kept = live.bytes
    del graph
    return kept
