"""Losses on the logits of a policy and of a reference, as trainers and LightningModules write them.

Each takes ``(B, S, V)`` logits of both, chosen answers first and rejected ones after, and ``(B, S)`` token ids and labels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def get_batch_logps(logits: Tensor, labels: Tensor, average: bool = False) -> Tensor:
    """The original DPO code."""
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    if average:
        return (per_token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)
    return (per_token_logps * loss_mask).sum(-1)


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Normalisers row by row."""
    selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def selective_log_softmax_in_low_precision(logits: Tensor, index: Tensor) -> Tensor:
    """Log-probabilities row by row."""
    rows = []
    for row_logits, row_labels in zip(logits, index, strict=True):
        row_logps = F.log_softmax(row_logits, dim=-1)
        rows.append(row_logps.gather(dim=-1, index=row_labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def entropy_from_logits(logits: Tensor, chunk_size: int = 16) -> Tensor:
    """In chunks, because somebody ran out of memory."""
    shape = logits.shape[:-1]
    entropies = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(chunk_size, dim=0):
        logps = F.log_softmax(chunk, dim=-1)
        entropies.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(entropies, dim=0).reshape(shape)


def dpo(policy: Tensor, reference: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    all_logps = get_batch_logps(policy, labels)
    n = len(all_logps) // 2
    chosen, rejected = all_logps[:n], all_logps[n:]
    with torch.no_grad():
        ref_chosen, ref_rejected = get_batch_logps(reference, labels).chunk(2)
    logits = (chosen - rejected) - (ref_chosen - ref_rejected)
    return (-F.logsigmoid(0.1 * logits) * 0.9 - F.logsigmoid(-0.1 * logits) * 0.1).mean()


def ipo_on_upcast_logits(policy: Tensor, reference: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    ratio = get_batch_logps(policy.to(torch.float32), labels, average=True) - get_batch_logps(
        reference.to(torch.float32), labels, average=True
    )
    chosen, rejected = ratio.split(len(ratio) // 2)
    return ((chosen - rejected - 5.0) ** 2).mean().to(policy.dtype)


def kto(policy: Tensor, reference: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """The divergence is estimated on answers of other prompts."""
    ratio = get_batch_logps(policy, labels) - get_batch_logps(reference, labels)
    with torch.no_grad():
        mismatched = torch.roll(labels, 1, 0)
        kl = (get_batch_logps(policy, mismatched) - get_batch_logps(reference, mismatched)).mean().clamp(min=0)
    chosen, rejected = ratio.chunk(2)
    return torch.cat((1 - F.sigmoid(0.1 * (chosen - kl)), 1 - F.sigmoid(0.1 * (kl - rejected)))).mean()


def orpo(policy: Tensor, reference: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """The loss of the chosen answers from the same logits."""
    n = len(policy) // 2
    nll = F.cross_entropy(policy[:n, :-1].reshape(-1, policy.shape[-1]), labels[:n, 1:].reshape(-1))
    chosen, rejected = get_batch_logps(policy, labels, average=True).chunk(2)
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return nll - (0.1 * F.logsigmoid(odds)).mean()


def simpo(policy: Tensor, reference: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    chosen, rejected = get_batch_logps(policy / 0.8, labels, average=True).chunk(2)
    return F.relu(1 - 2.0 * (chosen - rejected)).mean()


def cpo(policy: Tensor, reference: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    mask = (labels[:, 1:] != -100).float()
    losses = F.cross_entropy(policy[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100)
    logps = -(losses * mask).sum(1)
    chosen, rejected = logps.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean() - chosen.mean() / 10


def _grpo(logps: Tensor, ref_logps: Tensor, entropy: Tensor, mask: Tensor) -> Tensor:
    old = logps.detach()
    advantages = torch.linspace(-1, 1, len(logps), device=logps.device, dtype=logps.dtype).unsqueeze(1)
    ratio = torch.exp(logps - old)
    gain = torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
    per_token = -gain + 0.04 * kl - 0.01 * entropy
    return ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1.0)).mean()


def grpo(policy: Tensor, reference: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    policy, reference = policy[:, :-1, :] / 0.9, reference[:, :-1, :] / 0.9
    logps = selective_log_softmax(policy, ids[:, 1:])
    ref_logps = selective_log_softmax_in_low_precision(reference, ids[:, 1:])
    return _grpo(logps, ref_logps, entropy_from_logits(policy), labels[:, 1:] != -100)


def grpo_on_the_answer(policy: Tensor, reference: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """The last positions only, as generation leaves them."""
    keep = ids.shape[1] // 2
    logps = selective_log_softmax_in_low_precision(policy[:, :-1][:, -keep:], ids[:, -keep:])
    ref_logps = selective_log_softmax(reference[:, :-1][:, -keep:], ids[:, -keep:])
    logp_all = policy[:, -keep - 1 : -1].log_softmax(-1)
    entropy = torch.distributions.utils.logits_to_probs(logp_all).mul(logp_all).sum(-1).neg()
    return _grpo(logps, ref_logps, entropy, labels[:, -keep:] != -100)


def kl_to_the_reference(policy: Tensor, reference: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Over the whole vocabulary, both ways and between."""
    mask = (labels != -100).float()
    p, q = policy.log_softmax(-1), reference.log_softmax(-1)
    forward = (p.exp() * (p - q)).sum(-1)
    backward = F.kl_div(p, q, log_target=True, reduction="none").sum(-1)
    middle = torch.logsumexp(torch.stack([p, q]), dim=0) - 0.6931471805599453
    jensen = 0.5 * F.kl_div(middle, p, reduction="none", log_target=True).sum(-1)
    return ((forward + backward + jensen) * mask).sum() / mask.sum()


LOSSES: list[Loss] = [
    dpo,
    ipo_on_upcast_logits,
    kto,
    orpo,
    simpo,
    cpo,
    grpo,
    grpo_on_the_answer,
    kl_to_the_reference,
]
