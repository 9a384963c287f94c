"""More operators to compose: on the values one by one, and those that need them all."""

from __future__ import annotations

import random

import einops
import torch
import torch.nn.functional as F
from lazy_operators import FULL, LAZY, State, full, op, signed

__all__ = ["FULL", "LAZY", "State"]


@op
def copies(s: State, r: random.Random) -> State:
    forms = [
        lambda: s.x.contiguous(),
        lambda: s.x.clone(),
        lambda: torch.clone(s.x),
        lambda: s.x.to(s.x.device),
        lambda: s.x.to(s.x.dtype, copy=True),
        lambda: s.x.type(s.x.dtype),
        lambda: s.x.type_as(s.x),
        lambda: s.x + 0,
    ]
    return State(r.choice(forms)(), s.v)


@op
def upcast(s: State, r: random.Random) -> State:
    if s.x.dtype == torch.float64:
        return State(s.x.double(), s.v)
    forms = [lambda: s.x.float(), lambda: s.x.to(torch.float32), lambda: s.x.to(dtype=torch.float32)]
    return State(r.choice(forms)(), s.v)


@op
def scale(s: State, r: random.Random) -> State:
    forms = [
        lambda: s.x * 0.7,
        lambda: 1.3 * s.x,
        lambda: s.x / 1.7,
        lambda: torch.mul(s.x, 2),
        lambda: s.x.div(other=2.0),
        lambda: s.x / torch.tensor(1.5),
        lambda: -s.x,
        lambda: 1 - s.x,
        lambda: s.x - 0.25,
        lambda: torch.add(s.x, 1),
    ]
    return State(r.choice(forms)(), s.v)


@op
def soft_cap(s: State, r: random.Random) -> State:
    return State(torch.tanh(s.x / 3.0) * 3.0, s.v)


@op
def per_position_temperature(s: State, r: random.Random) -> State:
    shape = [1 if d == s.v else n for d, n in enumerate(s.x.shape)]
    return State(s.x / (torch.arange(1, 1 + torch.Size(shape).numel()).view(shape) / 4 + 1).to(s.x.dtype), s.v)


@op
def forbid(s: State, r: random.Random) -> State:
    shape = [n if d == s.v else 1 for d, n in enumerate(s.x.shape)]
    banned = (torch.arange(s.x.shape[s.v]) == 2).view(shape)
    if r.random() < 0.5:
        return State(s.x.masked_fill(banned, -50.0), s.v)
    return State(torch.where(banned, -50.0, s.x), s.v)


@op
def log_softmax(s: State, r: random.Random) -> State:
    d = signed(s.v, s.x.dim(), r)
    forms = [
        lambda: s.x.log_softmax(d),
        lambda: F.log_softmax(s.x, dim=d),
        lambda: torch.log_softmax(input=s.x, dim=d),
        lambda: s.x - s.x.logsumexp(d, keepdim=True),
    ]
    return State(r.choice(forms)(), s.v)


@op
def rearrange(s: State, r: random.Random) -> State:
    names = [f"d{i}" for i in range(s.x.dim())]
    order = names[:]
    r.shuffle(order)
    if r.random() < 0.3:
        return State(einops.rearrange(s.last(), "... v -> (...) v"), 1)
    return State(einops.rearrange(s.x, f"{' '.join(names)} -> {' '.join(order)}"), order.index(names[s.v]))


def lower(s: State, r: random.Random) -> State:
    """Not among the others: it needs the tolerance of bf16."""
    forms = [
        lambda: s.x.bfloat16(),
        lambda: s.x.to(torch.bfloat16),
        lambda: s.x.to(dtype=torch.bfloat16, non_blocking=True),
        lambda: s.x.type(torch.bfloat16),
        lambda: s.x.type_as(torch.empty(0, dtype=torch.bfloat16)),
    ]
    return State(r.choice(forms)(), s.v)


@op
def vocabulary_slice(s: State, r: random.Random) -> State:
    if s.v != s.x.dim() - 1 or s.x.shape[-1] < 8:
        return s
    return State(s.x[..., : s.x.shape[-1] - 1], s.v)


@full
def sort(s: State, r: random.Random) -> State:
    return State(s.x.sort(dim=s.v).values, s.v)


@full
def write(s: State, r: random.Random) -> State:
    x = s.x.clone()
    x.select(s.v, 0).mul_(0.5)
    return State(x, s.v)


@full
def set_item(s: State, r: random.Random) -> State:
    x = s.x * 1.0
    x[0] = 0.1
    return State(x, s.v)


@full
def index_put(s: State, r: random.Random) -> State:
    return State(s.x.index_put((torch.tensor([0]),), torch.tensor(0.3, dtype=s.x.dtype)), s.v)


@full
def cumulate(s: State, r: random.Random) -> State:
    return State(s.x.cumsum(s.v), s.v)


@full
def normalise_over_positions(s: State, r: random.Random) -> State:
    return State(s.x.softmax(s.lead[0]), s.v)


@full
def matmul(s: State, r: random.Random) -> State:
    x = s.last()
    return State(x @ torch.eye(x.shape[-1], dtype=x.dtype), x.dim() - 1)
