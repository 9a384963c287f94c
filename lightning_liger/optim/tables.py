"""Addresses of parameters, state and gradients, in the form in which kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_liger.optim import kernel
from lightning_liger.optim.formula import Row

_ALIGNMENT = 16


@dataclass(frozen=True)
class Segment:
    """Chunks that one launch can take.

    Attributes:
        dtype: of weights and gradients. aligned: every address is a multiple of 16.
        chunks: ``(C, 2)`` int32 on the device.
    """

    dtype: torch.dtype
    aligned: bool
    chunks: Tensor


class Tables:
    """Of tensors that are contiguous and on one device.

    Args:
        weights, first, second: parameters and both moments, as this rank holds them.
        keys: of each one's noise.
    """

    def __init__(
        self, weights: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], keys: Sequence[int]
    ) -> None:
        self._device = weights[0].device
        self._dtypes = [w.dtype for w in weights]
        self._numels = [w.numel() for w in weights]
        self._bf16_state = first[0].dtype == torch.bfloat16
        addresses = np.array([[t.data_ptr() for t in parts] for parts in zip(weights, first, second, strict=True)])
        self._low_bits = np.bitwise_or.reduce(addresses, axis=1)
        entries = np.concatenate([addresses, np.array([self._numels, keys]).T], axis=1)
        self._tensors = torch.from_numpy(entries.astype(np.int64)).to(self._device)
        self._aligned: np.ndarray | None = None
        self._segments: list[Segment] = []
        self._turns = self._rows = self._tensors[:0]

    def take(self, gradients: np.ndarray) -> None:
        """Gradients of this step: ``(N,)`` int64 addresses, 0 where there is none."""
        aligned = ((self._low_bits | gradients) % _ALIGNMENT) == 0
        if self._aligned is None or not np.array_equal(aligned, self._aligned):
            self._aligned = aligned
            self._segments = self._cut(aligned)

    def send(self, gradients: np.ndarray, rows: Sequence[Row] = (), row_of: Sequence[int] | None = None) -> None:
        """Bring what is different in every step to the device, in one copy that nothing waits for.

        Args:
            rows: the hyperparameters of this step. row_of: for each tensor, which of them are its own.
        """
        count = gradients.size * kernel.TURN
        numbers = np.zeros((len(rows), kernel.ROW), np.float32)
        for at, row in enumerate(rows):
            values = _values(row)
            numbers[at, : len(values)] = values
        pinned = self._device.type == "cuda"
        buffer = torch.empty(count + numbers.size // 2, dtype=torch.int64, device="cpu", pin_memory=pinned)
        host = buffer.numpy()
        turns = host[:count].reshape(-1, kernel.TURN)
        turns[:, 0] = gradients
        turns[:, 1] = 0 if row_of is None else row_of
        host[count:] = numbers.reshape(-1).view(np.int64)
        sent = buffer.to(self._device, non_blocking=True)
        self._turns, self._rows = sent[:count], sent[count:].view(torch.float32)
        for at, row in enumerate(rows):
            if isinstance(row.lr, Tensor):
                self._rows[at * kernel.ROW].copy_(row.lr.detach().reshape(()))

    def adam(self, factor: Tensor | None, write_gradient: bool) -> None:
        with torch.cuda.device_of(self._tensors):
            for segment in self._segments:
                kernel.adam(
                    self._tensors,
                    self._turns,
                    self._rows,
                    segment.chunks,
                    segment.dtype,
                    bf16_state=self._bf16_state,
                    aligned=segment.aligned,
                    factor=factor,
                    write_gradient=write_gradient,
                )

    def squares(self) -> Tensor:
        """The sum of squares of all gradients: fp32, ``()``."""
        total = sum(s.chunks.shape[0] for s in self._segments)
        sums, done = torch.empty(total, dtype=torch.float32, device=self._device), 0
        with torch.cuda.device_of(self._tensors):
            for segment in self._segments:
                end = done + segment.chunks.shape[0]
                kernel.squares(
                    self._tensors, self._turns, segment.chunks, sums[done:end], segment.dtype, aligned=segment.aligned
                )
                done = end
        return sums.sum()

    def _cut(self, aligned: np.ndarray) -> list[Segment]:
        lists: dict[tuple[torch.dtype, bool], list[np.ndarray]] = {}
        for tensor, (dtype, numel) in enumerate(zip(self._dtypes, self._numels, strict=True)):
            pieces = np.arange(-(-numel // kernel.CHUNK), dtype=np.int32)
            listed = np.stack([np.full_like(pieces, tensor), pieces], axis=1)
            lists.setdefault((dtype, bool(aligned[tensor])), []).append(listed)
        return [
            Segment(dtype, is_aligned, torch.from_numpy(np.concatenate(pieces)).to(self._device))
            for (dtype, is_aligned), pieces in lists.items()
        ]


def _values(row: Row) -> list[float]:
    """As :mod:`lightning_liger.optim.kernel` reads them; a learning rate on the device is put in place there."""
    return [
        0.0 if isinstance(row.lr, Tensor) else row.lr,
        row.weight_decay if row.decoupled else 0.0,
        0.0 if row.decoupled else row.weight_decay,
        row.beta2,
        1 - row.beta1,
        1 - row.beta2,
        row.eps,
        1 / row.correction1,
        1 / row.correction2_root,
        -1.0 if row.maximize else 1.0,
        float(row.step),
    ]
