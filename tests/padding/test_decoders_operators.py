"""Every operator that decoders may use on ragged tensors: the same at real tokens as on padded ones, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import Twice
from torch import Tensor

from lightning_liger.padding.layout import Layout
from lightning_liger.padding.plain_decoder.ragged import (
    Packing,
    RaggedTensor,
    Unpackable,
    gather,
    inside_block,
    rows_of,
    wrap,
)
from lightning_liger.report import PaddingReport

B, S, H = 3, 6, 8
LENGTHS = (6, 2, 4)
MASK = torch.tensor([[column < n for column in range(S)] for n in LENGTHS])


def make(left: bool = False) -> tuple[Tensor, RaggedTensor, Tensor]:
    """A padded tensor, the ragged one of the same values, and the leaf that both come from."""
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(B, S, H, generator=generator, dtype=torch.float64).requires_grad_()
    layout = Layout.from_mask(MASK.flip(1) if left else MASK)
    packing = Packing(layout, "auto", PaddingReport("test"))
    return leaf * 1.0, wrap(gather(leaf * 1.0, packing, 0, 1), packing, 0, 1), leaf


def own(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heads(x: Tensor) -> Tensor:
    return x.view(x.size(0), x.size(1), 2, -1).transpose(1, 2)


LN = nn.LayerNorm(H).double()
W, W2, COS, POS = own((5, H)), own((H, 5)), own((S, 4)), own((1, S, H))

SAME: dict[str, Callable[[Any], Any]] = {
    # element by element
    "add": lambda x: x + 1,
    "radd": lambda x: 2 - x,
    "vector": lambda x: x * own((H,)),
    "positions": lambda x: x + POS,
    "two dims": lambda x: x + POS[0],
    "per row": lambda x: x * own((B, 1, 1)),
    "per column": lambda x: x * own((S, 1)),
    "whole": lambda x: x + own((B, S, H)),
    "dense first": lambda x: own((B, S, H)) * x,
    "one": lambda x: x * own((1, 1, 1)) + own(()),
    "more dims": lambda x: x.unsqueeze(1) + own((B, 2, S, H)),
    "leading dims": lambda x: x + own((4, 1, 1, 1)),
    "trained positions": lambda x: x + (POS.clone().requires_grad_() * 1.0),
    "rotary": lambda x: heads(x) * torch.cat((COS[:, :2], COS[:, :2]), -1),
    "rotary 4": lambda x: x.view(B, S, 2, 4) * COS[None, :, None],
    "powers": lambda x: x.abs().sqrt() + x.pow(2) + x**3 + torch.rsqrt(x * x + 1),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked": lambda x: x.masked_fill((MASK & MASK.roll(1, 1)).unsqueeze(-1), 0.5),
    "clamp": lambda x: x.clamp(min=-0.5, max=0.5),
    "minimum": lambda x: torch.minimum(x, own((H,))),
    "max of two": lambda x: torch.max(x, -x),
    "activations": lambda x: F.gelu(x) + F.silu(x) + F.relu(x) ** 2 + torch.tanh(x) + F.softplus(x),
    "casts": lambda x: x.float().to(torch.float64).type_as(x).to(x).double(),
    "compare": lambda x: (x > 0) & ~(x > 1),
    "likes": lambda x: torch.zeros_like(x) + torch.full_like(x, 2) + x.new_ones(H),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.25),
    "in place": lambda x: (x * 2).add_(1).mul_(own((H,))),
    "in place operator": lambda x: _augmented(x),
    "relu in place": lambda x: F.relu(x - 0.1, inplace=True),
    # along a token's own dimensions
    "linear": lambda x: F.linear(x, W, own((5,))),
    "matmul": lambda x: x @ W2,
    "matmul 4": lambda x: heads(x).matmul(own((4, 3))),
    "layer norm": lambda x: LN(x),
    "rms norm": lambda x: F.rms_norm(x, (H,)),
    "norm of two dims": lambda x: F.layer_norm(x.view(B, S, 2, 4), (2, 4)),
    "rms by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "softmax": lambda x: x.softmax(-1) + F.log_softmax(x, dim=-1) + torch.softmax(x, 2),
    "sums": lambda x: x.sum(-1) + x.mean(2) + x.amax(dim=-1) + x.logsumexp(-1),
    "keepdim": lambda x: x.sum(-1, True) + x.mean(dim=(2,), keepdim=True) + x.norm(dim=-1, keepdim=True),
    "variance": lambda x: x.var(-1, False) + x.std(-1, unbiased=True) + x.var(dim=-1, correction=0),
    "variance kept": lambda x: x.var(-1, False, True),
    "over heads": lambda x: heads(x).sum(1),
    "max": lambda x: x.max(-1).values + x.max(-1, keepdim=True)[0].squeeze(-1),
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(3).values,
    "topk smallest": lambda x: x.topk(3, -1, False).values,
    "sort": lambda x: x.sort(-1, True).values,
    "cumsum": lambda x: x.cumsum(-1),
    "normalize": lambda x: F.normalize(x, dim=-1) + F.normalize(x, 2, 2),
    "glu": lambda x: F.glu(x),
    "flip": lambda x: x.flip(-1) + x.roll(1, -1),
    "einsum": lambda x: torch.einsum("bsd,dk->bsk", x, W2),
    "einsum moved": lambda x: torch.einsum("bsd,hdk->bhsk", x, own((2, H, 3))),
    "einsum of two": lambda x: torch.einsum("bsd,bsd->bs", x, x * 2),
    "einsum dense": lambda x: torch.einsum("bsd,bsk->bsdk", x, own((B, S, 3))),
    "addmm": lambda x: torch.addmm(own((5,)), x.view(-1, H), W2).view(B, S, 5),
    # shapes
    "heads": heads,
    "heads and back": lambda x: heads(x).transpose(1, 2).contiguous().view(B, S, H),
    "reshape": lambda x: x.reshape(B, S, 2, 2, 2).flatten(2),
    "inferred": lambda x: x.view(B, -1, 2, 4).unflatten(-1, (2, -1)),
    "rows": lambda x: x.view(-1, H),
    "rows and back": lambda x: (x.reshape(B * S, H) * own((H,))).view(B, S, 2, 4),
    "flattened": lambda x: x.flatten(0, 1).unflatten(0, (B, S)),
    "permute": lambda x: x.view(B, S, 2, 4).permute(2, 0, 3, 1),
    "qkv": lambda x: x.view(B, S, 2, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)[1],
    "qkv index": lambda x: x.view(B, S, 2, 2, 2).permute(2, 0, 3, 1, 4)[1],
    "sequence first": lambda x: (x.transpose(0, 1) + own((S, 1, H))).permute(1, 0, 2),
    "movedim": lambda x: x.view(B, S, 2, 4).movedim(2, 0).movedim((0, -1), (-1, 0)),
    "turned": lambda x: heads(x).mT,
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-1).squeeze(0).squeeze(-1),
    "split": lambda x: torch.cat([p * i for i, p in enumerate(x.split(3, dim=2))], -1),
    "split sizes": lambda x: x.split((2, 5, 1), -1)[1],
    "chunk": lambda x: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1),
    "halves": lambda x: torch.cat((-x[..., H // 2 :], x[..., : H // 2]), -1),
    "pairs": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "ints": lambda x: x.view(B, S, 4, 2)[..., 0] + x[:, :, None, 1:5][:, :, 0],
    "select": lambda x: heads(x).select(1, 1) + heads(x).narrow(1, 0, 1).squeeze(1),
    "stack in front": lambda x: torch.stack((x, x * 2)),
    "cat dense": lambda x: torch.cat((x, own((B, S, 2))), -1),
    "expand": lambda x: heads(x)[:, :, None].expand(B, 2, 3, S, 4).reshape(B, 6, S, 4),
    "expand in front": lambda x: x.expand(2, -1, -1, -1),
    "repeat heads": lambda x: heads(x).repeat_interleave(2, dim=1) * heads(x).repeat(1, 2, 1, 1),
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(B, S, 4, 2)) * torch.polar(torch.ones(S, 4).double(), COS)
    ).flatten(2),
    "as another": lambda x: (x.view(-1, H) * 2).view_as(x) + own((1, 1, H)).expand_as(x),
    "clone": lambda x: x.clone() + x.detach() + x.data,
    # attention
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x * 2), heads(-x), is_causal=True),
    "one head": lambda x: F.scaled_dot_product_attention(x, x * 2, -x, is_causal=True, scale=0.3),
    "masked attention": lambda x: F.scaled_dot_product_attention(
        heads(x), heads(x * 2), heads(-x), torch.ones(S, S).tril().bool()
    ),
    "biased attention": lambda x: F.scaled_dot_product_attention(
        x, 2 * x, -x, own((S, S)).masked_fill(torch.ones(S, S).triu(1) > 0, float("-inf"))
    ),
    "grouped": lambda x: F.scaled_dot_product_attention(
        heads(x), heads(x)[:, :1], heads(-x)[:, 1:], is_causal=True, enable_gqa=True
    ),
}


def _augmented(x: Any) -> Any:
    y = x * 2
    y += own((H,))
    y *= 2
    return y


def real(value: Any, like: RaggedTensor) -> Tensor:
    return gather(value, like.packing, like.batch, like.seq)


@pytest.mark.parametrize("name", SAME)
def test_the_same_at_real_tokens(name: str) -> None:
    function = SAME[name]
    gradients = []
    dense, _, _ = make()
    with inside_block():
        _, ragged, _ = make()
        found = function(ragged)
    assert isinstance(found, RaggedTensor), type(found)
    expected = function(dense)
    assert tuple(found.shape) == tuple(expected.shape) and found.dtype == expected.dtype
    rows = rows_of(found)
    torch.testing.assert_close(rows, real(expected, found), rtol=1e-12, atol=1e-12)
    if not rows.requires_grad:
        assert not expected.requires_grad or not expected.dtype.is_floating_point
        return
    weights = own(tuple(rows.shape), 7)
    for values, source in ((rows, ragged), (real(expected, found), dense)):
        start = source.data_ if isinstance(source, RaggedTensor) else source
        (gradient,) = torch.autograd.grad((values * weights).sum(), start)
        gradients.append(gradient if isinstance(source, RaggedTensor) else gather(gradient, ragged.packing, 0, 1))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-11, atol=1e-11)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: x.mean(),
    "norm": lambda x: x.norm(),
    "over the sequence": lambda x: x.mean(1),
    "over the batch": lambda x: x.sum((0, 2)),
    "no dims": lambda x: x.sum(dim=()),
    "softmax over tokens": lambda x: x.softmax(1),
    "cumsum over tokens": lambda x: x.cumsum(1),
    "last token": lambda x: x[:, -1],
    "all but one": lambda x: x[:, 1:],
    "by mask": lambda x: x[MASK],
    "by numbers": lambda x: x[:, [0, 1]],
    "one row": lambda x: x[0],
    "scores": lambda x: x @ x.transpose(1, 2),
    "einsum scores": lambda x: torch.einsum("bid,bjd->bij", x, x),
    "einsum sum": lambda x: torch.einsum("bsd->bd", x),
    "bmm": lambda x: torch.bmm(x, own((B, H, 2))),
    "longer": lambda x: torch.cat((own((B, 1, H)), x), 1),
    "wider batch": lambda x: torch.cat((x, x)),
    "mixed view": lambda x: x.view(B, S * H),
    "halved": lambda x: x.view(B, S // 2, 2, H),
    "shifted": lambda x: x.roll(1, 1),
    "padded": lambda x: F.pad(x, (0, 0, 1, 0)),
    "conv": lambda x: F.conv1d(x.transpose(1, 2), own((H, H, 1))),
    "batch norm": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True),
    "value": lambda x: x.sum(-1).sum(-1).item(),
    "numpy": lambda x: x.detach().numpy(),
    "into another": lambda x: own((B, S, H)).copy_(x),
    "item assignment": lambda x: x.__setitem__((slice(None), 0), 1.0),
    "write through a view": lambda x: (x * 1).view(B, S, 2, 4).add_(1),
    "write into the argument": lambda x: x.add_(1),
    "sequence as features": lambda x: F.linear(x.transpose(1, 2), own((2, S))),
    "all turned": lambda x: x.T,
    "looks ahead": lambda x: F.scaled_dot_product_attention(x, x, x),
    "looks at padding": lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(S, S).bool()),
    "over heads": lambda x: F.scaled_dot_product_attention(x.view(B, S, 2, 4), x.view(B, S, 2, 4), x.view(B, S, 2, 4)),
    "to a prefix": lambda x: F.scaled_dot_product_attention(x, own((B, 9, H)), own((B, 9, H))),
    "own function": lambda x: copy.copy(Twice.apply(x) + 1),
    "two places": lambda x: x.transpose(0, 1) + x.view(B, S, H),
    "backward hooks": lambda x: x.register_hook(lambda g: g),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    _, ragged, _ = make()
    with pytest.raises(Unpackable):
        REFUSED[name](ragged)


def test_padding_on_the_left_needs_a_mask() -> None:
    _, ragged, _ = make(left=True)
    with pytest.raises(Unpackable):
        F.scaled_dot_product_attention(ragged, ragged, ragged, is_causal=True)
    mask = torch.ones(S, S).tril().bool() & MASK.flip(1)[:, None, :] | torch.eye(S, dtype=torch.bool)
    dense, ragged, _ = make(left=True)
    found = F.scaled_dot_product_attention(ragged, ragged, ragged, mask)
    assert isinstance(found, RaggedTensor)
    expected = F.scaled_dot_product_attention(dense, dense, dense, mask)
    torch.testing.assert_close(rows_of(found), real(expected, found))
