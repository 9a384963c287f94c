"""Parts of a block that see one token at a time run on rows as ordinary tensors, as fast as ever."""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch import Tensor

from lightning_liger.padding.plain_decoder.dispatch import WATCHED
from lightning_liger.padding.plain_decoder.ragged import PLACES, RaggedTensor, Unpackable, rows_of, wrap
from lightning_liger.patching import Rebound, Switch


class PackedPart(Rebound):
    """``forward`` of a norm, an MLP, or anything else that never looks at where a token stands.

    Whether that is so is found out by :mod:`~lightning_liger.padding.plain_decoder.proof`, which also compares the
    result. A module that runs on a kernel of ours is known to be one.

    Args:
        module: the part; switch: shared on/off flag.
        known: it runs on a kernel that works row by row.
    """

    def __init__(self, module: nn.Module, switch: Switch, known: bool) -> None:
        super().__init__(module, switch)
        self.known = known
        self.by_row = known

    def call(self, *args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(tensor, RaggedTensor) or (tensor.batch, tensor.seq) != (0, 1) or tensor.dim() < 3:
            return self.original(*args, **kwargs)
        if WATCHED.get() and not self.known:
            return self._watched(tensor)
        if not self.by_row:
            return self.original(tensor)
        rows = rows_of(tensor)[None]
        found = self.original(rows)
        if not isinstance(found, Tensor) or found.shape[:2] != rows.shape[:2]:
            raise Unpackable(f"{type(self.module).__name__} gives something else for single tokens than before")
        return wrap(found[0], tensor.packing, 0, 1)

    def _watched(self, tensor: RaggedTensor) -> Any:
        token = PLACES.set([])
        try:
            found = self.original(tensor)
            places = PLACES.get()
        finally:
            PLACES.reset(token)
        # a number made of either size would be the same by chance
        telling = tensor.shape[0] > 1 and tensor.packing.layout.tokens != tensor.shape[1]
        same = isinstance(found, RaggedTensor) and (found.batch, found.seq) == (0, 1)
        self.by_row = not places and telling and same
        return found
