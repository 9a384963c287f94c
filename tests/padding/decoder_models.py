"""Small decoders as people write them in plain PyTorch, each with a habit of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import VOCAB, Twice
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LONGEST = 32, 4, 64
Attend = Callable[..., Tensor]


def mlp(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.0))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
    mask = torch.tril(torch.ones(q.size(2), q.size(2), device=q.device)).view(1, 1, q.size(2), q.size(2))
    return F.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(k.size(-1))
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bhjd->bhid", scores.masked_fill(mask, -1e9).softmax(-1), v)


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.size(-2), device=q.device)
    distance = i[:, None] - i[None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < 5))


def with_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.size(-2), device=q.device)
    distance = i[:, None] - i[None, :]
    slopes = torch.tensor([2.0**-n for n in range(1, q.size(1) + 1)]).view(-1, 1, 1)
    bias = (-slopes * distance).masked_fill(distance < 0, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].to(q.dtype))


def looking_ahead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    def __init__(self, attend: Attend = causal) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in (q, k, v))
        y = self.attend(q, k, v)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, attend: Attend = causal) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), Attention(attend), nn.LayerNorm(WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Learned positions, a tied head, and the loss inside of ``forward``."""

    def __init__(self, attend: Attend = causal, reentrant: bool | None = None, ignore: int = -100) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(LONGEST, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(Block(attend) for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.reentrant, self.ignore = reentrant, ignore

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = self.hidden(idx)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=self.ignore)

    def hidden(self, idx: Tensor) -> Tensor:
        positions = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.transformer["ln_f"](x)


# -- rotary ------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x_f = x.float()
        return (x_f * torch.rsqrt(x_f.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(*s, bias=False) for s in ((32, 48), (32, 48), (48, 32)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def angles(dim: int, length: int = LONGEST, device: torch.device | None = None) -> Tensor:
    places = torch.arange(length, device=device).float()
    return torch.outer(places, 1.0 / (1e4 ** (torch.arange(0, dim, 2, device=device).float() / dim)))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return (x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin).type_as(x)


def turned_complex(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """The way of the first LLaMA: pairs as complex numbers."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    shape = [d if i in (1, pairs.ndim - 1) else 1 for i, d in enumerate(pairs.shape)]
    return torch.view_as_real(pairs * freqs_cis.view(*shape)).flatten(3).type_as(x)


class LlamaAttention(nn.Module):
    """Grouped heads; where the angles come from is the ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.kv = kind, HEADS // 2
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        cache = angles(WIDTH // HEADS)
        self.register_buffer("cache", torch.stack([cache.cos(), cache.sin()], -1), persistent=False)

    def forward(self, x: Tensor, *rope: Tensor, mask: Tensor | None = None) -> Tensor:
        bsz, seqlen, _ = x.shape
        q = self.wq(x).view(bsz, seqlen, HEADS, -1)
        k = self.wk(x).view(bsz, seqlen, self.kv, -1)
        v = self.wv(x).view(bsz, seqlen, self.kv, -1).transpose(1, 2)
        if self.kind == "complex":
            q, k = turned_complex(q, rope[0]).transpose(1, 2), turned_complex(k, rope[0]).transpose(1, 2)
            k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        elif self.kind == "inside":
            q, k = self.rotate(q).transpose(1, 2), self.rotate(k).transpose(1, 2)
            k, v = (t.unsqueeze(2).expand(bsz, self.kv, 2, -1, WIDTH // HEADS).flatten(1, 2) for t in (k, v))
        else:
            q, k = (turned(t.transpose(1, 2), *rope) for t in (q, k))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.kind == "passed"
        )
        return self.wo(out.transpose(1, 2).reshape(bsz, seqlen, -1))

    def rotate(self, x: Tensor) -> Tensor:
        """As torchtune does: the length is asked of the tensor, the pairs lie side by side."""
        cache = self.cache[: x.size(1)]
        shaped = x.float().reshape(*x.shape[:-1], -1, 2)
        cache = cache.view(-1, shaped.size(1), 1, shaped.size(3), 2)
        a, b = shaped[..., 0], shaped[..., 1]
        out = [a * cache[..., 0] - b * cache[..., 1], b * cache[..., 0] + a * cache[..., 1]]
        return torch.stack(out, -1).flatten(3).type_as(x)


class LlamaBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm_1, self.attn, self.norm_2, self.mlp = RMSNorm(), LlamaAttention(kind), RMSNorm(), SwiGLU()

    def forward(self, x: Tensor, *rope: Tensor, mask: Tensor | None = None) -> Tensor:
        h = x + self.attn(self.norm_1(x), *rope, mask=mask)
        return h + self.mlp(self.norm_2(h))


class Llama(nn.Module):
    """``kind``: cos and sin ``(S, D)`` passed to the blocks, complex numbers passed, or a cache inside of attention."""

    def __init__(self, kind: str = "passed", reentrant: bool | None = None) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock(kind) for _ in range(2))
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, VOCAB, bias=False)
        self.kind, self.reentrant = kind, reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.norm(self.hidden(tokens))).float()

    def hidden(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        turns = angles(WIDTH // HEADS, length, tokens.device)
        rope: tuple[Tensor, ...] = ()
        if self.kind == "passed":
            rope = (torch.cat((turns, turns), -1).cos(), torch.cat((turns, turns), -1).sin())
        elif self.kind == "complex":
            rope = (torch.polar(torch.ones_like(turns), turns),)
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, *rope) if self.reentrant is None else checkpoint(layer, h, *rope, use_reentrant=self.reentrant)
        return h


# -- masks -------------------------------------------------------------------------------------------------------------


class Masked(Llama):
    """Attention under a mask made from a ``(B, S)`` one; ``inverted``: True marks padding."""

    def __init__(self, inverted: bool = False, additive: bool = False) -> None:
        super().__init__("inside")
        self.inverted, self.additive = inverted, additive

    def forward(self, tokens: Tensor, pad_mask: Tensor) -> Tensor:
        real = ~pad_mask if self.inverted else pad_mask.bool()
        length = tokens.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()[None] & real[:, None, :]
        # a row of padding must see something, or its softmax is 0 / 0
        allowed = (allowed | torch.eye(length, dtype=torch.bool))[:, None]
        mask = torch.where(allowed, 0.0, float("-inf")) if self.additive else allowed
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, mask=mask)
        return self.output(self.norm(h))


class CausalMasked(Llama):
    """lit-llama: a causal mask of all positions is kept, and its corner passed to every block."""

    def __init__(self) -> None:
        super().__init__("inside")
        self.mask_cache: Tensor | None = None

    def hidden(self, tokens: Tensor) -> Tensor:
        if self.mask_cache is None:
            self.mask_cache = torch.tril(torch.ones(LONGEST, LONGEST, dtype=torch.bool))[None, None]
        length = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, mask=self.mask_cache[:, :, :length, :length])
        return h


# -- between the blocks ------------------------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """Takes and returns tuples, mixes in the first hidden states and an embedding of values."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.lambdas = Block(), nn.Parameter(torch.tensor([1.0, 0.1, 0.1]))

    def forward(self, state: tuple[Tensor, Tensor], x0: Tensor) -> tuple[Tensor, Tensor]:
        x, values = state
        x = self.lambdas[0] * x + self.lambdas[1] * x0 + self.lambdas[2] * values
        return self.block(x), values


class Residual(nn.Module):
    """Skip connections around the stack, an RMS norm without weights, a soft-capped head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.values = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(4))
        self.skips = nn.Parameter(torch.tensor([0.5, 0.2]))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = x0 = F.rms_norm(self.embed(ids), (WIDTH,))
        values, kept = self.values(ids), []
        for i, block in enumerate(self.blocks):
            if i >= 2:
                x = x + self.skips[i - 2] * kept.pop()
            x, values = block((x, values), x0)
            kept.append(x)
        logits = self.lm_head(F.rms_norm(x, (WIDTH,)))
        return {"logits": 15 * torch.tanh(logits / 15)}


class InSequence(nn.Module):
    """Everything in one ``nn.Sequential``, the blocks in another."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.net = nn.Sequential(nn.Embedding(VOCAB, WIDTH), blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)


class SequenceFirst(NanoGPT):
    """``(S, B, H)`` between the blocks."""

    def hidden(self, idx: Tensor) -> Tensor:
        x = self.transformer["wte"](idx).transpose(0, 1)
        x = x + self.transformer["wpe"].weight[: idx.size(1), None]
        for block in self.transformer["h"]:
            x = block(x.transpose(0, 1)).permute(1, 0, 2)
        return self.transformer["ln_f"](x.transpose(0, 1))


class Einsums(nn.Module):
    """Projections by einsum, merged rows in the MLP, a functional tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(EinsumBlock() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return 0.2 * x @ self.embed.weight.T


class EinsumBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, HEADS, WIDTH, WIDTH // HEADS) * 0.2)
        self.out = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS, WIDTH) * 0.2)
        self.ff, self.norm = mlp(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bsd,nhde->nbhse", self.norm(x), self.qkv).unbind(0)
        x = x + torch.einsum("bhse,hed->bsd", causal(q, k, v), self.out)
        return x + self.ff(x.reshape(-1, WIDTH)).view_as(x)


# -- what keeps its padding ----------------------------------------------------------------------------------------------


class Statistics(NanoGPT):
    """Reads all positions on its way."""

    def hidden(self, idx: Tensor) -> Tensor:
        x = super().hidden(idx)
        self.activity = x.pow(2).mean()
        return x


class Keeping(NanoGPT):
    """Leaves hidden states behind in itself."""

    def hidden(self, idx: Tensor) -> Tensor:
        self.last = super().hidden(idx)
        return self.last


class OwnFunction(NanoGPT):
    """An autograd function of one's own, inside of attention."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v: causal(Twice.apply(q), k, v))


class Convolution(NanoGPT):
    """A convolution along the sequence before the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def hidden(self, idx: Tensor) -> Tensor:
        x = self.transformer["wte"](idx)
        x = x + self.conv(x.transpose(1, 2))[..., :-2].transpose(1, 2)
        for block in self.transformer["h"]:
            x = block(x)
        return self.transformer["ln_f"](x)


@dataclass
class Output:
    hidden: Tensor
    logits: Tensor | None = None


class Backbone(Llama):
    """Answers with hidden states in a dataclass."""

    def forward(self, tokens: Tensor) -> Any:
        return Output(self.norm(self.hidden(tokens)))
