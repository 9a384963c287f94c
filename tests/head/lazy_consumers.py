"""What reads logits in the end of a random composition."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from lazy_operators import State
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy
from torchmetrics.functional.text import perplexity
from transformers.loss.loss_utils import ForCausalLMLoss

Consumer = Callable[[State, random.Random], Tensor]


def labels_for(shape: torch.Size, vocab: int, r: random.Random) -> Tensor:
    return torch.tensor([r.randrange(vocab) for _ in range(shape.numel())]).view(shape)


def rows(s: State) -> Tensor:
    x = s.last()
    return x.reshape(-1, x.shape[-1])


def cross_entropy(s: State, r: random.Random) -> Tensor:
    x = rows(s)
    labels = labels_for(x.shape[:1], x.shape[1], r)
    labels[1:][torch.tensor([r.random() < 0.3 for _ in range(len(labels) - 1)], dtype=torch.bool)] = -1
    weight = (torch.arange(x.shape[1]) / 7 + 0.2).to(x.dtype) if r.random() < 0.4 else None
    return F.cross_entropy(
        x,
        labels,
        weight=weight,
        ignore_index=-1,
        label_smoothing=r.choice([0.0, 0.0, 0.2]),
        reduction=r.choice(["mean", "sum", "none"]),
    )


def cross_entropy_over_dims(s: State, r: random.Random) -> Tensor:
    x = s.last().movedim(-1, 1) if s.x.dim() > 2 else rows(s)
    return F.cross_entropy(x, labels_for(torch.Size([x.shape[0], *x.shape[2:]]), x.shape[1], r))


def soft_targets(s: State, r: random.Random) -> Tensor:
    x = rows(s)
    targets = torch.softmax(torch.linspace(0, 3, x.numel(), dtype=torch.float64).view(x.shape), -1).to(x.dtype)
    return F.cross_entropy(x, targets, reduction=r.choice(["mean", "sum", "none"]))


def nll(s: State, r: random.Random) -> Tensor:
    x = rows(s)
    weight = (torch.arange(x.shape[1]) / 7 + 0.2).to(x.dtype) if r.random() < 0.4 else None
    kind = r.choice(["mean", "sum", "none"])
    return F.nll_loss(F.log_softmax(x, -1), labels_for(x.shape[:1], x.shape[1], r), weight=weight, reduction=kind)


def gather(s: State, r: random.Random) -> Tensor:
    x = s.last()
    ids = labels_for(x.shape[:-1], x.shape[-1], r)
    form = r.randrange(4)
    if form == 0:
        return x.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if form == 1:
        return torch.gather(x.log_softmax(-1), dim=x.dim() - 1, index=ids[..., None])[..., 0]
    if form == 2:
        return torch.take_along_dim(x, ids[..., None], dim=-1)
    return s.x.gather(s.v, ids.unsqueeze(s.v))


def indexing(s: State, r: random.Random) -> Tensor:
    x = rows(s)
    return x[torch.arange(len(x)), labels_for(x.shape[:1], x.shape[1], r)]


def one_id(s: State, r: random.Random) -> Tensor:
    x = s.last()
    form = r.randrange(3)
    if form == 0:
        return x[..., 3]
    if form == 1:
        return x[..., [1, 2]]
    return x[0, ..., 1]


def logsumexp(s: State, r: random.Random) -> Tensor:
    return s.x.logsumexp(s.v, keepdim=r.random() < 0.5).square().mean()


def entropy(s: State, r: random.Random) -> Tensor:
    p, logp = s.x.softmax(s.v), s.x.log_softmax(s.v)
    return -(p * logp).sum(s.v) if r.random() < 0.5 else -(logp.exp() * logp).sum(dim=s.v)


def reduction(s: State, r: random.Random) -> Tensor:
    name = r.choice(["sum", "mean", "amax", "amin", "logsumexp", "std", "var"])
    return getattr(s.x, name)(dim=s.v - s.x.dim(), keepdim=r.random() < 0.5)


def whole_reduction(s: State, r: random.Random) -> Tensor:
    return r.choice(
        [lambda: s.x.sum(), lambda: torch.mean(s.x), lambda: s.x.max(), lambda: s.x.sum(dim=(s.lead[0], s.v))]
    )()


def confidence(s: State, r: random.Random) -> Tensor:
    return s.x.softmax(s.v).max(dim=s.v).values


def top(s: State, r: random.Random) -> Tensor:
    return s.x.topk(3, dim=s.v).values if r.random() < 0.5 else torch.topk(s.last(), k=2).values


def ids(s: State, r: random.Random) -> Tensor:
    forms = [
        lambda: s.x.argmax(s.v),
        lambda: s.last().topk(2).indices,
        lambda: torch.argmin(s.x, dim=s.v, keepdim=True),
    ]
    return r.choice(forms)()


def hugging_face(s: State, r: random.Random) -> Tensor:
    """Its loss shifts by itself, upcasts to fp32 and divides by the items of the whole step."""
    x = rows(s)[None].repeat(1, 2, 1)
    labels = labels_for(x.shape[:2], x.shape[2], r)
    labels[:, 1::3] = -100
    labels[:, -1] = 0
    items = torch.tensor(5) if r.random() < 0.5 else None
    return ForCausalLMLoss(x, labels, vocab_size=x.shape[2], num_items_in_batch=items)


def several(s: State, r: random.Random) -> Tensor:
    """Readers that share their products, in any order, of the same rows in different shapes."""
    x = s.last()
    ids_ = labels_for(x.shape[:-1], x.shape[-1], r)
    readers = [
        lambda: x.log_softmax(-1).gather(-1, ids_[..., None])[..., 0].sum(),
        lambda: (x.logsumexp(-1) ** 2).mean(),
        lambda: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
        lambda: F.cross_entropy(rows(s), ids_.flatten()),
        lambda: x.amax(-1).mean(),
        lambda: 0.0 * (s.x.argmax(s.v) == ids_).sum(),
    ]
    chosen = r.sample(readers, r.randint(2, len(readers)))
    return sum(read() * (i + 1) for i, read in enumerate(chosen)) + x.logsumexp(-1).mean()


def distilled(s: State, r: random.Random) -> Tensor:
    """From probabilities that somebody stored."""
    x = s.last()
    target = torch.softmax(torch.linspace(-2, 2, x.numel(), dtype=torch.float64).view(x.shape), -1).to(x.dtype)
    kind = r.choice(["batchmean", "sum", "mean", "none"])
    loss = F.kl_div(x.log_softmax(-1), target, reduction=kind)
    return loss.sum(-1) if kind == "none" else loss


def perplexity_of(s: State, r: random.Random) -> Tensor:
    x = rows(s)[None]
    labels = labels_for(x.shape[:2], x.shape[2], r)
    labels[:, 1::2] = -100
    return perplexity(x, labels, ignore_index=-100)


def accuracy(s: State, r: random.Random) -> Tensor:
    x = rows(s)
    labels = labels_for(x.shape[:1], x.shape[1], r)
    return multiclass_accuracy(x, labels, num_classes=x.shape[1], average="micro", top_k=r.choice([1, 1, 2]))


def hits_at_three(s: State, r: random.Random) -> Tensor:
    x = s.last()
    best = torch.topk(x, 3, dim=-1)[1]
    return (best == labels_for(x.shape[:-1], x.shape[-1], r)[..., None]).any(-1).float().mean()


SMOOTH: list[Consumer] = [
    hugging_face,
    several,
    distilled,
    cross_entropy,
    cross_entropy_over_dims,
    soft_targets,
    nll,
    gather,
    indexing,
    one_id,
    logsumexp,
    entropy,
    reduction,
    whole_reduction,
]
SHARP: list[Consumer] = [confidence, top, ids, accuracy, hits_at_three, perplexity_of]
