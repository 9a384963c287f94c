"""The losses of ``lightning_liger.losses``: as Liger's own chunked losses, and the same on lazy as on ordinary logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lazy_cases import Case, assert_same, case
from liger_kernel import chunked_loss
from torch import Tensor

from lightning_liger import losses

B, S, V = 4, 6, 9


def labels(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, V, (B, S), generator=generator)
    found[:, :2] = -100
    found[1, 4:] = -100
    return found


def small(seed: int = 0) -> Case:
    return case(batch=B, length=S, vocab=V, dtype=torch.float32, bias=False, seed=seed)


def liger(name: str, c: Case, y: Tensor, **options: Any) -> Tensor:
    """Liger shifts nothing: rows ``s`` and labels ``s + 1`` side by side; chosen first, rejected after."""
    kind = getattr(chunked_loss, f"LigerFusedLinear{name}Loss")
    extra = {k: options.pop(k) for k in ("ref_input", "ref_weight", "preference_labels", "kl") if k in options}
    made = kind(compiled=False, **options)
    rows, target = c.hidden[:, :-1].contiguous(), y[:, 1:].contiguous()
    given = (rows, c.weight, target) if name == "KTO" else (c.weight, rows, target)
    found: Tensor = made(*given, **extra)[0]
    return found


def halves(x: Tensor, y: Tensor, average: bool) -> tuple[Tensor, Tensor]:
    chosen, rejected = losses.sequence_log_probs(x, y, average=average).chunk(2)
    return chosen, rejected


def test_as_liger_computes_them() -> None:
    c, r, y = small(), small(seed=1), labels()
    x, z = c.lazy(), r.lazy().detach()
    reference = {"ref_input": r.hidden[:, :-1].detach(), "ref_weight": r.weight.detach()}
    ours = {
        "DPO": losses.dpo_loss(*halves(x, y, False), *halves(z, y, False), beta=0.3),
        "ORPO": losses.orpo_loss(*halves(x, y, True), beta=0.3),
        "SimPO": losses.simpo_loss(*halves(x, y, True), beta=0.3, gamma=0.2),
        "CPO": losses.cpo_loss(*halves(x, y, False), beta=0.3, label_smoothing=0.1),
    }
    theirs = {
        "DPO": liger("DPO", c, y, beta=0.3, **reference),
        "ORPO": liger("ORPO", c, y, beta=0.3, compute_nll_loss=False),
        "SimPO": liger("SimPO", c, y, beta=0.3, gamma=0.2, compute_nll_loss=False),
        "CPO": liger("CPO", c, y, beta=0.3, label_smoothing=0.1, compute_nll_loss=False),
    }
    for name, loss in ours.items():
        torch.testing.assert_close(loss, theirs[name], msg=lambda m, n=name: f"{n}: {m}")
        found, expected = (torch.autograd.grad(t, c.leaves) for t in (loss, theirs[name]))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")
    kind = torch.tensor([True, False, False, True])
    loss = losses.kto_loss(
        losses.sequence_log_probs(x, y), losses.sequence_log_probs(z, y), kind, torch.tensor(0.4), beta=0.3
    )
    theirs_kto = liger(
        "KTO", c, y, beta=0.3, use_ref_model=True, preference_labels=kind, kl=torch.tensor(0.4), **reference
    )
    torch.testing.assert_close(loss, theirs_kto)
    assert c.report.materialised_by == r.report.materialised_by == {}


@pytest.mark.parametrize("padded", [False, True])
def test_lazy_as_ordinary(padded: bool) -> None:
    policy, reference = (case(batch=2, length=S, vocab=V, padded=padded, seed=s) for s in (0, 2))
    y = labels()[:2]  # the second row is shorter in both

    def dpo(x: Tensor, z: Tensor) -> Tensor:
        return losses.dpo_loss(*halves(x, y, False), *halves(z, y, False))

    def grpo(x: Tensor, z: Tensor) -> Tensor:
        logp, mask = losses.token_log_probs(x, y, temperature=0.7)
        other, _ = losses.token_log_probs(z, y, temperature=0.7)
        return losses.grpo_loss(
            logp, torch.linspace(-1, 1, len(y)), mask, old_log_probs=other, reference_log_probs=other
        )

    def distil(beta: float) -> Any:
        return lambda x, z: losses.distillation_loss(x, z, y != -100, temperature=2.0, beta=beta)

    for function in (dpo, grpo, distil(0.0), distil(0.3), distil(1.0)):
        assert_same([policy, reference], function, 1e-4, fused=True)
        assert policy.plain.reads == reference.plain.reads == []


def test_grpo_of_a_fresh_sample_is_the_policy_gradient() -> None:
    c, y = small(), labels()
    logp, mask = losses.token_log_probs(c.lazy(), y)
    advantages = torch.linspace(-1, 1, B)
    expected = -((logp * mask).sum(-1) / mask.sum(-1) * advantages).mean()
    found = losses.grpo_loss(logp, advantages, mask)
    pairs = zip(
        torch.autograd.grad(found, c.leaves, retain_graph=True), torch.autograd.grad(expected, c.leaves), strict=True
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b)


def test_bad_input() -> None:
    x, y = small().lazy(), labels()
    with pytest.raises(ValueError, match="do not fit labels"):
        losses.token_log_probs(x, y[:, :-1])
    with pytest.raises(ValueError, match="from 0 to 1"):
        losses.distillation_loss(x, x, y != -100, beta=2.0)
    with pytest.raises(ValueError, match="do not fit"):
        losses.distillation_loss(x, x[..., :-1], y != -100)
    with pytest.raises(IndexError, match="outside of the vocabulary"):
        losses.sequence_log_probs(x, y.masked_fill(y == -100, V))
