"""Losses on the log-probabilities of answers, for those who would rather call them than write them.

They take logits as a model returns them, ``(B, S, V)`` at every position of ``labels`` ``(B, S)``. On accelerated
models those are lazy: log-probabilities are computed in chunks of rows, no ``(B, S, V)`` tensor is made and padding
is neither computed nor read. On ordinary logits the results are the same. Gradients flow through every argument that
carries them; run the reference model under :func:`torch.no_grad`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "cpo_loss",
    "distillation_loss",
    "dpo_loss",
    "grpo_loss",
    "kto_loss",
    "orpo_loss",
    "sequence_log_probs",
    "simpo_loss",
    "token_log_probs",
]


def token_log_probs(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of each next token.

    Args:
        logits: ``(B, S, V)``, where position ``s`` predicts ``labels[:, s + 1]``.
        labels: ``(B, S)`` int64; ``ignore_index`` where a token is not part of the answer.
        temperature: divides the logits.

    Returns:
        ``(B, S - 1)`` log-probabilities, 0 where ignored, and the ``(B, S - 1)`` bool mask of those that count.

    Raises:
        ValueError: shapes that do not fit. IndexError: a label outside of the vocabulary.
    """
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(labels.shape)}: expected "
            "(B, S, V) and (B, S), both as the model got and gave them (the shift is made here)."
        )
    if temperature != 1.0:
        logits = logits / temperature
    target = labels[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), target, ignore_index=ignore_index, reduction="none")
    return -losses, target != ignore_index


def sequence_log_probs(logits: Tensor, labels: Tensor, *, average: bool = False, ignore_index: int = -100) -> Tensor:
    """``(B,)`` log-probability of each answer: the sum over its tokens, or their mean with ``average``.

    Args: see :func:`token_log_probs`.
    """
    found, mask = token_log_probs(logits, labels, ignore_index=ignore_index)
    total = found.sum(-1)
    return total / mask.sum(-1) if average else total


def _preference(margin: Tensor, label_smoothing: float) -> Tensor:
    return (-F.logsigmoid(margin) * (1 - label_smoothing) - F.logsigmoid(-margin) * label_smoothing).mean()


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimisation (Rafailov et al., arXiv:2305.18290, eq. 7), a scalar.

    Args:
        chosen, rejected, reference_chosen, reference_rejected: ``(B,)`` from :func:`sequence_log_probs`.
        label_smoothing: probability that a preference is the wrong way round (conservative DPO).
    """
    return _preference(beta * ((chosen - rejected) - (reference_chosen - reference_rejected)), label_smoothing)


def kto_loss(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    desirable: Tensor,
    kl: Tensor | float = 0.0,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimisation (Ethayarajh et al., arXiv:2402.01306, eq. 8), a scalar.

    Args:
        log_probs, reference_log_probs: ``(B,)`` from :func:`sequence_log_probs`.
        desirable: ``(B,)`` bool.
        kl: estimate of the divergence from the reference, on mismatched pairs; detached and not below zero.
    """
    baseline = torch.as_tensor(kl, dtype=log_probs.dtype, device=log_probs.device).detach().clamp_min(0.0)
    ratio = log_probs - reference_log_probs
    wanted = 1 - torch.sigmoid(beta * (ratio - baseline))
    unwanted = 1 - torch.sigmoid(beta * (baseline - ratio))
    return torch.where(desirable, desirable_weight * wanted, undesirable_weight * unwanted).mean()


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """The odds-ratio term of ORPO (Hong et al., arXiv:2403.07691, eq. 7), a scalar; add the chosen answers' loss to it.

    Args:
        chosen, rejected: ``(B,)`` from :func:`sequence_log_probs` with ``average=True``.
    """
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -beta * F.logsigmoid(odds).mean()


def simpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, gamma: float = 0.5, label_smoothing: float = 0.0
) -> Tensor:
    """SimPO (Meng et al., arXiv:2405.14734, eq. 6 with the margin ``gamma`` outside of ``beta``), a scalar.

    Args:
        chosen, rejected: ``(B,)`` from :func:`sequence_log_probs` with ``average=True``.
    """
    return _preference(beta * (chosen - rejected) - gamma, label_smoothing)


def cpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """The preference term of CPO (Xu et al., arXiv:2401.08417, eq. 4), a scalar; add the chosen answers' loss to it.

    Args:
        chosen, rejected: ``(B,)`` from :func:`sequence_log_probs`.
    """
    return _preference(beta * (chosen - rejected), label_smoothing)


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    beta: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> Tensor:
    """Group-relative policy optimisation (Shao et al., arXiv:2402.03300, eq. 3 and 4), a scalar.

    Args:
        log_probs: ``(B, S)`` of the tokens under the policy, and ``mask``, both from :func:`token_log_probs`.
        advantages: ``(B,)``, normalised in each group.
        old_log_probs: ``(B, S)`` under the policy that sampled; the policy itself, detached, when it just did.
        reference_log_probs: ``(B, S)``; with them ``beta`` times the divergence from the reference is added.
    """
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    ratio = torch.exp(log_probs - old)
    advantages = advantages.unsqueeze(-1)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if reference_log_probs is not None:
        difference = reference_log_probs - log_probs
        losses = losses + beta * (torch.exp(difference) - difference - 1)
    return ((losses * mask).sum(-1) / mask.sum(-1).clamp_min(1)).mean()


def distillation_loss(
    student: Tensor, teacher: Tensor, mask: Tensor, *, temperature: float = 1.0, beta: float = 0.0
) -> Tensor:
    """Mean divergence between the next-token distributions of two models with one vocabulary, a scalar.

    Args:
        student, teacher: ``(B, S, V)`` logits; ``mask``: ``(B, S)`` bool, the positions that count.
        temperature: divides both; the loss is not multiplied by its square.
        beta: 0 is ``KL(teacher || student)``, 1 is ``KL(student || teacher)``, between them the generalised
            Jensen-Shannon divergence with weight ``beta`` on the teacher (Agarwal et al., arXiv:2306.13649, eq. 1).

    Raises:
        ValueError: ``beta`` outside of ``[0, 1]``, or shapes that differ.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta={beta!r}: expected a number from 0 to 1.")
    if student.shape != teacher.shape or student.shape[:-1] != mask.shape:
        raise ValueError(
            f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)} and mask {tuple(mask.shape)} do not fit: "
            "expected (B, S, V) twice and (B, S)."
        )
    p = torch.log_softmax(teacher[mask] / temperature, -1)
    q = torch.log_softmax(student[mask] / temperature, -1)
    if beta == 0.0:
        return F.kl_div(q, p, reduction="batchmean", log_target=True)
    if beta == 1.0:
        return F.kl_div(p, q, reduction="batchmean", log_target=True)
    logs = torch.log(torch.tensor([beta, 1 - beta], dtype=torch.float64)).tolist()
    middle = torch.logaddexp(p + logs[0], q + logs[1])
    return beta * F.kl_div(middle, p, reduction="batchmean", log_target=True) + (1 - beta) * F.kl_div(
        middle, q, reduction="batchmean", log_target=True
    )
