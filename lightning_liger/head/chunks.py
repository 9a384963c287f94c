"""How many rows of logits exist at a time: from a budget of memory, not from the ratio of vocabulary to hidden size."""

from __future__ import annotations

import math

import torch

# One chunk of logits. Large enough that dW is accumulated few times, small beside the model. On a CPU the
# chunk should stay near the cache, on a GPU it should fill the matrix units.
_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
_MIN_ROWS = {"cpu": 64, "cuda": 1024}
# A kernel that works in place keeps one copy of a chunk where others keep several.
_IN_PLACE = {"cpu": 1.0, "cuda": 1.5}
# The same kernel where no gradient of a weight is summed in the first pass, and others hold logits of their own.
_SPARING = {"cpu": 1.0, "cuda": 0.75}
# All copies of one chunk that a program of several steps makes.
_COPIES_BYTES = 512 << 20
# Gradients of several chunks side by side, to be multiplied at once.
_TOGETHER_BYTES = {"cpu": 0, "cuda": 192 << 20}
# Rows of a matrix product are computed in tiles of so many.
_TILE = {"cpu": 1, "cuda": 128}


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "cpu"


def chunk_rows(vocab: int, device: torch.device, entry_bytes: int = 4) -> int:
    """The most rows in one chunk of ``(rows, vocab)`` logits."""
    kind = _kind(device)
    return max(_MIN_ROWS[kind], _CHUNK_BYTES[kind] // (entry_bytes * vocab))


def rows_of_copies(vocab: int, device: torch.device, copies: int) -> int:
    """The most rows in one chunk of which ``copies`` tensors in fp32 live at once."""
    if _kind(device) == "cpu":
        return chunk_rows(vocab, device, 8)
    return max(_TILE["cuda"], _COPIES_BYTES // (4 * copies * vocab) // _TILE["cuda"] * _TILE["cuda"])


def rows_together(vocab: int, device: torch.device, entry_bytes: int, step: int) -> int:
    """How many rows' gradients, of chunks of ``step`` rows, are multiplied at once; 0 for every chunk by itself."""
    return _TOGETHER_BYTES[_kind(device)] // (entry_bytes * vocab) // max(1, step) * step


def row_chunks(
    n: int,
    vocab: int,
    device: torch.device,
    entry_bytes: int,
    *,
    in_place: bool = False,
    sparing: bool = False,
    spared: int = 0,
) -> list[slice]:
    """``n`` rows in chunks as even as tiles allow: a small last one costs as much accumulation as a large one.

    Args:
        in_place: the chunk is the only tensor of its size.
        sparing: it is not what the step's memory is for.
        spared: bytes of sums over chunks that a single chunk would not need.
    """
    kind = _kind(device)
    limit = chunk_rows(vocab, device, entry_bytes)
    if in_place:
        limit = int(limit * (_SPARING if sparing else _IN_PLACE)[kind])
    if n <= limit + spared // (entry_bytes * vocab):
        return [slice(0, n)] if n else []
    size = math.ceil(n / math.ceil(n / limit) / _TILE[kind]) * _TILE[kind]
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]
