"""More losses as public LightningModules write them: each a function from ``(module, batch)`` to a loss.

Where a line is unusual it is so in the wild.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from helpers import PAD, VOCAB
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity


def logits_of(m: Any, b: Any) -> Tensor:
    found: Tensor = m.model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits
    return found


def unlikelihood_of_the_context(m: Any, b: Any) -> Any:
    """Tokens that came before must not come again."""
    logits, ids = logits_of(m, b)[:, :-1], b["input_ids"]
    target, mask = ids[:, 1:], b["attention_mask"][:, 1:].bool()
    logp = F.log_softmax(logits, 2)
    n = target.shape[1]
    before = target.unsqueeze(1).repeat(1, n, 1).tril(-1)
    before = before.masked_fill(before == target.unsqueeze(2), 0)
    candidates = logp.gather(2, before)
    penalty = -torch.log(torch.clamp(1.0 - candidates.exp(), min=1e-5)) * (before != 0)
    nll = F.nll_loss(logp.transpose(1, 2), target, reduction="none")
    return ((nll + penalty.sum(2) / n) * mask).sum() / mask.sum()


def targets_moved_with_cat(m: Any, b: Any) -> Any:
    targets = b["input_ids"].clone()[:, 1:]
    targets = torch.cat([targets, PAD * torch.ones_like(targets[:, :1])], dim=1)
    logits = logits_of(m, b)
    loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=PAD)
    preds = torch.argmax(logits, dim=2)
    mask = targets != PAD
    m.log("TA", (preds[mask] == targets[mask]).float().mean())
    return loss


def torchmetrics_of_the_logits(m: Any, b: Any) -> Any:
    out = m.model(**b)
    shifted, labels = out.logits[..., :-1, :].contiguous(), b["labels"][..., 1:].contiguous()
    perplexity = Perplexity(ignore_index=-100)
    accuracy = MulticlassAccuracy(num_classes=VOCAB, average="micro", ignore_index=-100)
    keep = b["attention_mask"][..., 1:].bool()
    m.log("perplexity", perplexity(shifted[keep][None], labels[keep][None]))
    m.log("accuracy", accuracy(shifted[keep], labels[keep]))
    return out.loss


def kept_losses(m: Any, b: Any) -> Any:
    logits, y = logits_of(m, b)[:, :-1], b["input_ids"][:, 1:]
    loss_all = F.cross_entropy(logits.permute((0, 2, 1)).float(), y, reduction="none")
    return loss_all[b["labels"][:, 1:] != -100].mean()


def mixed_with_the_uniform(m: Any, b: Any) -> Any:
    keep = b["labels"][:, 1:] != -100
    probs = F.softmax(logits_of(m, b)[:, :-1][keep], dim=-1)
    logits = torch.log(0.01 * torch.ones_like(probs) / VOCAB + 0.99 * probs)
    return F.nll_loss(logits, b["labels"][:, 1:][keep])


def mean_of_sequence_means(m: Any, b: Any) -> Any:
    logits = logits_of(m, b)[:, :-1]
    prob = (
        -F.cross_entropy(
            logits.reshape(-1, VOCAB),
            b["labels"][:, 1:].reshape(-1),
            reduction="none",
            ignore_index=-100,
            label_smoothing=0.1,
        )
        .view(logits.shape[0], -1)
        .mean(-1)
    )
    return -prob.mean()


def one_hot_targets(m: Any, b: Any) -> Any:
    keep = b["labels"][:, 1:] != -100
    logp = logits_of(m, b)[:, :-1].log_softmax(-1)
    wanted = F.one_hot(b["labels"][:, 1:].clamp(min=0), VOCAB).float()
    return -((logp * wanted).sum(-1) * keep).sum() / keep.sum()


def focal_and_poly(m: Any, b: Any) -> Any:
    logits = logits_of(m, b)[:, :-1]
    ce = F.cross_entropy(logits.flatten(0, 1), b["labels"][:, 1:].flatten(), reduction="none")
    pt = torch.exp(-ce)
    keep = b["labels"][:, 1:].flatten() != -100
    return (((1 - pt) ** 2 * ce + 0.5 * (1 - pt)) * keep).sum() / keep.sum()


def policy_gradient_with_a_distribution(m: Any, b: Any) -> Any:
    keep = b["labels"][:, 1:] != -100
    policy = torch.distributions.Categorical(logits=logits_of(m, b)[:, :-1][keep], validate_args=False)
    actions = b["input_ids"][:, 1:][keep]
    reward = (actions % 5).float() - 2
    return -(policy.log_prob(actions) * reward).mean() - 0.01 * policy.entropy().mean()


def weight_of_each_sequence(m: Any, b: Any) -> Any:
    shifted, labels = logits_of(m, b)[..., :-1, :].contiguous(), b["labels"][..., 1:].contiguous()
    loss = nn.CrossEntropyLoss(reduction="none")(shifted.view(-1, shifted.size(-1)), labels.view(-1))
    per_sequence = loss.view(shifted.size(0), shifted.size(1)).sum(1) / (labels != -100).sum(1)
    return (per_sequence * torch.linspace(0.5, 1.5, len(per_sequence))).mean()


def selected_and_distilled(m: Any, b: Any) -> Any:
    """The student's logits against the teacher's, where a mask of the logits' own width says so."""
    s_logits = logits_of(m, b)
    with torch.no_grad():
        t_logits = logits_of(m, b)
    mask = (b["labels"] > -1).unsqueeze(-1).expand_as(s_logits)
    s = torch.masked_select(s_logits, mask).view(-1, s_logits.size(-1))
    t = torch.masked_select(t_logits, mask).view(-1, s_logits.size(-1)) * 0.7
    assert t.size() == s.size()
    ce = nn.KLDivLoss(reduction="batchmean")(F.log_softmax(s / 2.0, dim=-1), F.softmax(t / 2.0, dim=-1)) * 4.0
    shifted = s_logits[..., :-1, :].contiguous()
    return 0.5 * ce + F.cross_entropy(shifted.view(-1, shifted.size(-1)), b["labels"][..., 1:].contiguous().view(-1))


def chunks_of_logits(m: Any, b: Any) -> Any:
    logits, targets = logits_of(m, b)[:, :-1].reshape(-1, VOCAB), b["labels"][:, 1:].reshape(-1)
    pairs = zip(logits.split(7), targets.split(7), strict=True)
    losses = torch.cat([F.cross_entropy(x, y, ignore_index=-100, reduction="none") for x, y in pairs])
    return losses.sum() / (targets != -100).sum().maximum(torch.ones((), dtype=torch.long))


def confidence_head(m: Any, b: Any) -> Any:
    """Something else is trained towards what the model thinks of the labels."""
    out = m.model(**b)
    keep = b["labels"][:, 1:] != -100
    with torch.no_grad():
        probs = out.logits[:, :-1][keep].softmax(dim=-1)
        right = probs.gather(-1, b["labels"][:, 1:][keep][:, None]).squeeze(-1)
    top = out.logits[:, :-1][keep].softmax(-1).amax(-1)
    return out.loss + F.mse_loss(top, right)


def yes_or_no_at_the_end(m: Any, b: Any) -> Any:
    logits = logits_of(m, b)
    end = b["attention_mask"].long().cumsum(1).argmax(1)
    scores = logits[torch.arange(len(end)), end][:, [3, 4]]
    return F.cross_entropy(scores, b["input_ids"][:, 1] % 2)


def einops_all_the_way(m: Any, b: Any) -> Any:
    flat = rearrange(logits_of(m, b)[:, :-1], "b s v -> (b s) v")
    loss = F.cross_entropy(flat, rearrange(b["labels"][:, 1:], "b s -> (b s)"), reduction="none")
    loss = rearrange(loss, "(b s) -> b s", b=len(b["labels"]))
    return (loss.sum(1) / (b["labels"][:, 1:] != -100).sum(1)).mean()


def margin_to_the_runner_up(m: Any, b: Any) -> Any:
    keep = b["labels"][:, 1:] != -100
    x, y = logits_of(m, b)[:, :-1][keep], b["labels"][:, 1:][keep]
    best, runner_up = x.topk(2, dim=-1).values.unbind(-1)
    chosen = x.gather(1, y.view(-1, 1)).squeeze(1)
    return F.relu(1.0 + best - chosen).mean() + 0.1 * (best - runner_up).mean()


LOSSES = [
    unlikelihood_of_the_context,
    targets_moved_with_cat,
    torchmetrics_of_the_logits,
    kept_losses,
    mixed_with_the_uniform,
    mean_of_sequence_means,
    one_hot_targets,
    focal_and_poly,
    policy_gradient_with_a_distribution,
    weight_of_each_sequence,
    selected_and_distilled,
    chunks_of_logits,
    confidence_head,
    yes_or_no_at_the_end,
    einops_all_the_way,
    margin_to_the_runner_up,
]
