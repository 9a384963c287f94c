"""The gradient of a head's product, chunk after chunk, until there is enough of it to multiply.

Chunks of programs are small where several copies of them live. Each would be added into the whole gradient of the
weight, which costs more than the product itself; so a few chunks are put side by side, in the dtype of the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_liger.head.chunks import rows_together
from lightning_liger.head.sums import add_product


class Collected:
    """Adds ``dz.T @ rows`` to the weight's sum, ``dz @ weight`` to the rows' and ``dz`` to the bias's.

    Args:
        tensors: ``(N, H)`` rows, ``(V, H)`` weight, ``(V,)`` bias; ``sums``: where their gradients go, or None.
        dtype: of the products.
        step: rows of a chunk.
    """

    def __init__(
        self, tensors: Sequence[Tensor | None], sums: Sequence[Tensor | None], dtype: torch.dtype, step: int
    ) -> None:
        rows, weight, _ = tensors
        assert rows is not None and weight is not None
        self._rows, self._weight = rows, weight
        self._d_rows, self._d_weight, self._d_bias = sums
        self._dtype = dtype
        self._room = rows_together(weight.shape[0], rows.device, dtype.itemsize, step)
        self._buffer: Tensor | None = None
        self._held = slice(0, 0)

    def add(self, dz: Tensor, part: slice) -> None:
        """``dz`` ``(n, V)`` of rows ``part``."""
        if self._d_bias is not None:
            self._d_bias += dz.sum(0, dtype=self._d_bias.dtype)
        count, held = part.stop - part.start, self._held.stop - self._held.start
        if held and (part.start != self._held.stop or held + count > self._room):
            self.flush()
            held = 0
        if count >= self._room:
            self._multiply(dz.to(self._dtype), part)
            return
        if self._buffer is None:
            room = min(self._room, self._rows.shape[0])
            self._buffer = torch.empty(room, dz.shape[1], dtype=self._dtype, device=dz.device)
        self._buffer[held : held + count] = dz
        self._held = slice(self._held.start if held else part.start, part.stop)

    def flush(self) -> None:
        """Multiply what is held."""
        count = self._held.stop - self._held.start
        if count:
            assert self._buffer is not None
            self._multiply(self._buffer[:count], self._held)
        self._held = slice(0, 0)

    def _multiply(self, gradient: Tensor, part: slice) -> None:
        if self._d_rows is not None:
            self._d_rows[part] = gradient @ self._weight.to(self._dtype)
        if self._d_weight is not None:
            add_product(self._d_weight, gradient, self._rows[part].to(self._dtype))
