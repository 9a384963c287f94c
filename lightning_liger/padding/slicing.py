"""Can the tokens of a packed batch be divided? Asked of a tiny model of the same kind, as its packing was.

A backbone can be run on slices of a batch if its tokens meet in attention only, which exchanges what it needs. With
attention that answers zeros, a slice must then give what the whole batch gives in its place: convolutions, recurrent
state and whatever else looks at neighbours does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.head.lazy import LazyRows
from lightning_liger.padding.apart import apart
from lightning_liger.padding.buckets import foreign_hook
from lightning_liger.padding.probe import small_model

_SILENT = "liger_silent"
_LENGTHS = (7, 17)
# a model whose tokens meet nowhere else differs by the order in which experts sum in fp32
_TOLERANCE = {torch.float64: 2e-5, torch.float32: 1e-4}


def why_not_sliced(backbone: Any) -> str:
    """Why ranks cannot each run a slice of the tokens of a packed batch, or ``""``."""
    name = type(backbone).__name__
    for part_name, part in backbone.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            return f"{type(part).__name__} takes the mean over all tokens"
        if foreign_hook(part):
            return f"a forward hook on {part_name or name} would see a slice of the tokens"
    with apart():
        try:
            difference = _difference(small_model(backbone))
        except Exception as error:  # the model's own code: what cannot be asked is not divided
            text = " ".join(str(error).split())[:160]
            return f"a small {name} does not run on a slice of its tokens ({type(error).__name__}: {text})"
    if not difference <= 1.0:
        return f"tokens of {name} meet outside of attention, so that a slice of them gives another result"
    return ""


def _difference(tiny: Any) -> float:
    """Largest difference between slices and the whole, in tolerances."""
    for dtype in (torch.float64, torch.float32):
        tiny.to(dtype)
        try:
            whole = _hidden(tiny, slice(0, sum(_LENGTHS)))
        except RuntimeError:
            if dtype == torch.float32:
                raise
            continue
        break
    middle = sum(_LENGTHS) // 2
    sliced = torch.cat([_hidden(tiny, slice(0, middle)), _hidden(tiny, slice(middle, None))], 1)
    return float((whole - sliced).abs().max() / whole.abs().max().clamp_min(1e-12)) / _TOLERANCE[dtype]


def _hidden(tiny: Any, part: slice) -> Tensor:
    """``(1, t, H)`` hidden states of the tokens in ``part``, called as a packed batch is."""
    vocab = tiny.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocab, (1, sum(_LENGTHS)), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(n) for n in _LENGTHS])[None]
    ends = torch.tensor((0, *_LENGTHS)).cumsum(0).to(torch.int32)
    documents = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(_LENGTHS),
        "max_length_k": max(_LENGTHS),
    }
    with torch.no_grad(), _silent_attention(tiny.config):
        output = tiny(input_ids=ids[:, part], position_ids=positions[:, part], use_cache=False, **documents)
    found = output[0]
    assert not isinstance(found, LazyRows)
    return found


@contextmanager
def _silent_attention(config: Any) -> Iterator[None]:
    from transformers.modeling_utils import AttentionInterface

    mapping, before = AttentionInterface._global_mapping, config._attn_implementation_internal
    mapping[_SILENT] = _zeros
    config._attn_implementation_internal = _SILENT
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        mapping.pop(_SILENT, None)


def _zeros(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
