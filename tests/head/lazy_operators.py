"""Operators to compose at random: those that keep logits lazy, and those that compute the values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class State:
    """Logits under way, and where the vocabulary is."""

    x: Tensor
    v: int

    @property
    def lead(self) -> list[int]:
        return [d for d in range(self.x.dim()) if d != self.v]

    def last(self) -> Tensor:
        """The vocabulary moved to the end."""
        return self.x.movedim(self.v, -1)


Op = Callable[[State, random.Random], State]
LAZY: dict[str, Op] = {}
FULL: dict[str, Op] = {}


def op(function: Op) -> Op:
    LAZY[function.__name__] = function
    return function


def full(function: Op) -> Op:
    """An operator that has to compute the values."""
    FULL[function.__name__] = function
    return function


def signed(d: int, n: int, r: random.Random) -> int:
    return d - n if r.random() < 0.5 else d


@op
def transpose(s: State, r: random.Random) -> State:
    n = s.x.dim()
    a, b = r.randrange(n), r.randrange(n)
    name = r.choice(["transpose", "swapaxes", "swapdims", "torch", "keyword"])
    i, j = signed(a, n, r), signed(b, n, r)
    if name == "torch":
        x = torch.transpose(s.x, i, j)
    elif name == "keyword":
        x = s.x.transpose(dim0=i, dim1=j)
    else:
        x = getattr(s.x, name)(i, j)
    return State(x, b if s.v == a else a if s.v == b else s.v)


@op
def permute(s: State, r: random.Random) -> State:
    order = list(range(s.x.dim()))
    r.shuffle(order)
    given_ = [signed(d, s.x.dim(), r) for d in order]
    forms = [lambda: s.x.permute(*given_), lambda: s.x.permute(given_), lambda: torch.permute(s.x, dims=tuple(given_))]
    return State(r.choice(forms)(), order.index(s.v))


@op
def movedim(s: State, r: random.Random) -> State:
    n = s.x.dim()
    count = r.randint(1, n)
    source, target = r.sample(range(n), count), r.sample(range(n), count)
    marked = torch.empty([2 if d == s.v else 1 for d in range(n)]).movedim(source, target)
    v = list(marked.shape).index(2)
    if count == 1 and r.random() < 0.5:
        return State(torch.movedim(s.x, source[0], target[0] - n), v)
    return State(s.x.movedim(tuple(source), tuple(target)), v)


@op
def unsqueeze(s: State, r: random.Random) -> State:
    if s.x.dim() > 4:
        return s
    d = r.randint(0, s.x.dim())
    x = s.x.unsqueeze(dim=d) if r.random() < 0.5 else torch.unsqueeze(s.x, d - s.x.dim() - 1)
    return State(x, s.v + (d <= s.v))


@op
def newaxis(s: State, r: random.Random) -> State:
    return State(s.x[None], s.v + 1) if s.x.dim() < 5 else s


@op
def squeeze(s: State, r: random.Random) -> State:
    ones = [d for d in s.lead if s.x.shape[d] == 1]
    if not ones or len(s.lead) < 2:
        return s
    d = r.choice(ones)
    return State(s.x.squeeze(signed(d, s.x.dim(), r)), s.v - (d < s.v))


@op
def flatten(s: State, r: random.Random) -> State:
    runs = [(a, a + 1) for a in s.lead if a + 1 in s.lead]
    if not runs:
        return s
    a, b = r.choice(runs)
    x = torch.flatten(s.x, start_dim=a, end_dim=b) if r.random() < 0.5 else s.x.flatten(a, b - s.x.dim())
    return State(x, s.v - (a < s.v))


@op
def reshape(s: State, r: random.Random) -> State:
    if s.v != s.x.dim() - 1:
        return s
    vocab = s.x.size(-1)
    form = r.randrange(4)
    if form == 0:
        return State(s.x.reshape(-1, vocab), 1)
    if form == 1:
        return State(s.x.contiguous().view(-1, s.x.shape[-1]), 1)
    if form == 2:
        return State(torch.reshape(s.x, (1, -1, vocab)), 2)
    return State(s.x.reshape(*s.x.shape[:-1], 1, -1), s.x.dim())


@op
def reshape_around(s: State, r: random.Random) -> State:
    """The vocabulary stays where it is."""
    before, after = s.x.shape[: s.v], s.x.shape[s.v + 1 :]
    forms = [(-1, s.x.shape[s.v], after.numel()), (*before, s.x.shape[s.v], -1), (before.numel(), -1, *after)]
    i = r.randrange(3)
    return State(s.x.reshape(forms[i]), [1, s.v, 1][i])


@op
def unflatten(s: State, r: random.Random) -> State:
    d = r.choice(s.lead)
    n = s.x.shape[d]
    if s.x.dim() > 4 or n % 2:
        return s
    return State(s.x.unflatten(d, (2, n // 2)), s.v + (d < s.v))


@op
def cut(s: State, r: random.Random) -> State:
    d = r.choice(s.lead)
    n = s.x.shape[d]
    if n < 2:
        return s
    where = [slice(None)] * s.x.dim()
    where[d] = r.choice([slice(1, None), slice(None, -1), slice(-2, None), slice(None, None, 2)])
    form = r.randrange(4)
    if form == 0 and s.v == s.x.dim() - 1 and d == s.x.dim() - 2:
        return State(s.x[..., where[d], :], s.v)
    if form == 1:
        return State(torch.narrow(s.x, dim=d, start=1, length=n - 1), s.v)
    if form == 2:
        return State(s.x.narrow(d - s.x.dim(), 0, n - 1), s.v)
    return State(s.x[tuple(where)], s.v)


@op
def select(s: State, r: random.Random) -> State:
    if len(s.lead) < 2:
        return s
    d = r.choice(s.lead)
    i = r.randrange(-s.x.shape[d], s.x.shape[d])
    where = [slice(None)] * s.x.dim()
    where[d] = i  # type: ignore[call-overload]
    x = s.x.select(d, i) if r.random() < 0.5 else s.x[tuple(where)]
    return State(x, s.v - (d < s.v))


@op
def pick(s: State, r: random.Random) -> State:
    d = r.choice(s.lead)
    n = s.x.shape[d]
    index = torch.tensor([r.randrange(n) for _ in range(r.randint(1, 4))])
    if d == 0 and s.v == s.x.dim() - 1 and r.random() < 0.5:
        return State(s.x[index] if r.random() < 0.5 else s.x[index.tolist()], s.v)
    return State(torch.index_select(s.x, dim=d, index=index), s.v)


@op
def mask(s: State, r: random.Random) -> State:
    if s.v != s.x.dim() - 1 or len(s.lead) < 1:
        return s
    count = r.randint(1, len(s.lead))
    keep = torch.tensor([r.random() < 0.7 for _ in range(s.x.shape[:count].numel())]).view(s.x.shape[:count])
    keep.view(-1)[0] = True
    x = s.x[keep]
    return State(x, x.dim() - 1)


@op
def pieces(s: State, r: random.Random) -> State:
    d = r.choice(s.lead)
    n = s.x.shape[d]
    form = r.randrange(5)
    if form == 0:
        return State(r.choice(s.x.split(2, dim=d)), s.v)
    if form == 1:
        return State(torch.split(s.x, [1, n - 1], d)[0], s.v)
    if form == 2:
        return State(s.x.chunk(2, d - s.x.dim())[0], s.v)
    if form == 3:
        return State(torch.tensor_split(s.x, 2, dim=d)[0] if n > 1 else s.x, s.v)
    if len(s.lead) < 2:
        return s
    return State(r.choice(torch.unbind(s.x, dim=d)), s.v - (d < s.v))


@op
def iterate(s: State, r: random.Random) -> State:
    if s.v == 0 or len(s.lead) < 2:
        return s
    return State(torch.stack(list(s.x), dim=0), s.v)


@op
def join(s: State, r: random.Random) -> State:
    if s.x.numel() > 4000 or s.x.dim() > 4:
        return s
    d = r.choice(s.lead)
    form = r.randrange(4)
    if form == 0:
        return State(torch.cat([s.x, s.x.flip(d)], dim=d), s.v)
    if form == 1:
        return State(torch.cat((s.x.narrow(d, 0, 1), s.x), d), s.v)
    if form == 2:
        return State(torch.stack([s.x, s.x.roll(1, d)], dim=d), s.v + (d <= s.v))
    return State(torch.stack((s.x, s.x)), s.v + 1)


@op
def spread(s: State, r: random.Random) -> State:
    if s.x.numel() > 4000 or s.x.dim() > 4:
        return s
    form = r.randrange(4)
    d = r.choice(s.lead)
    if form == 0:
        return State(s.x.unsqueeze(0).expand(2, *[-1] * s.x.dim()), s.v + 1)
    if form == 1:
        return State(s.x.repeat([2 if i == d else 1 for i in range(s.x.dim())]), s.v)
    if form == 2:
        return State(s.x.repeat_interleave(2, dim=d), s.v)
    return State(torch.repeat_interleave(s.x, torch.arange(s.x.shape[d]) + 1, dim=d), s.v)


@op
def turn(s: State, r: random.Random) -> State:
    d = r.choice(s.lead)
    return State(s.x.flip(d) if r.random() < 0.5 else torch.roll(s.x, shifts=1, dims=d), s.v)
