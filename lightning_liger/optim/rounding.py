"""Stochastic rounding of fp32 to bf16, with noise that is a function of place and step.

A value between two neighbours in bf16 becomes the upper one with the probability of its distance from the lower: the
expected result is the value itself, so that changes below half of a neighbour's distance, such as Adam's of its second
moment (a thousandth of it, beside 2^-8), are not lost. Gupta et al., "Deep Learning with Limited Numerical Precision"
(2015); for moments of Adam: Zamirai et al., "Revisiting BFloat16 Training" (2020), and torchao's ``optim`` and llm.c.

Noise comes from a hash of the entry's number, the parameter's and the step: nothing has to be saved to go on with the same
numbers, and all ranks that hold the same entry round it alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def hashed(x: int) -> int:
    """32 bits in, 32 well mixed bits out: ``lowbias32`` of https://github.com/skeeto/hash-prospector."""
    x &= _WORD
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)


def hashed_all(x: Tensor) -> Tensor:
    """:func:`hashed` of each entry: int64 with values below 2^32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)


def key_at(key: int, step: int) -> int:
    """What the noise of one parameter starts from in one step."""
    return hashed(key + step * 0x9E3779B9)


def noise(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """``(count,)`` int64 below 2^32, for the entries from ``start`` on; 16 bits for each of two values."""
    places = torch.arange(start, start + count, device=device, dtype=torch.int64)
    return hashed_all((places + key) & _WORD)


def to_bf16(values: Tensor, random: Tensor) -> Tensor:
    """``values`` rounded by 16 random bits each; infinities and NaN stay what they are.

    Args:
        values: fp32. random: integers below 2^16, of the same shape.
    """
    bits = values.contiguous().view(torch.int32).to(torch.int64) & _WORD
    up = ((bits + random) >> 16) << 16
    signed = torch.where(up >= 2**31, up - 2**32, up).to(torch.int32)
    return torch.where(values.isnan(), values, signed.view(torch.float32)).to(torch.bfloat16)
