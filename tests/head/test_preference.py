"""Preference optimisation as LightningModules write it: log-probabilities of answers under a policy and a reference.

No ``(B, S, V)`` tensor is made, no padded position is computed, and training is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import PAD, VOCAB, assert_same, both, causal_lm
from torch import Tensor
from torch.utils.data import DataLoader

Batch = dict[str, Tensor]


def rows(count: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> Tensor:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(3, VOCAB, (length,), generator=generator)

    return [
        {"prompt": ids(2, 7), "chosen": ids(2, 10), "rejected": ids(2, 14), "kind": i % 3 > 0} for i in range(count)
    ]


def padded(sequences: list[tuple[Tensor, Tensor]]) -> Batch:
    longest = max(len(p) + len(a) for p, a in sequences)
    made = {
        "input_ids": torch.full((len(sequences), longest), PAD),
        "attention_mask": torch.zeros(len(sequences), longest, dtype=torch.long),
        "labels": torch.full((len(sequences), longest), -100),
    }
    for i, (prompt, answer) in enumerate(sequences):
        n = len(prompt) + len(answer)
        made["input_ids"][i, :n] = torch.cat([prompt, answer])
        made["attention_mask"][i, :n] = 1
        made["labels"][i, len(prompt) : n] = answer
    return made


def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "chosen": padded([(r["prompt"], r["chosen"]) for r in batch]),
        "rejected": padded([(r["prompt"], r["rejected"]) for r in batch]),
        "kind": torch.tensor([r["kind"] for r in batch]),
        "advantage": torch.linspace(-1, 1, len(batch)),
    }


def data() -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=3, collate_fn=collate)  # type: ignore[arg-type]


# -- log-probabilities, as they are written ---------------------------------------------------------------------------


def by_gather(model: nn.Module, batch: Batch, average: bool = False) -> Tensor:
    """The DPO reference implementation's ``_get_batch_logps``."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.to(torch.float32)
    labels = batch["labels"][:, 1:].clone()
    logits = logits[:, :-1, :]
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    if average:
        return (per_token * loss_mask).sum(-1) / loss_mask.sum(-1)
    return (per_token * loss_mask).sum(-1)


def by_selective_log_softmax(model: nn.Module, batch: Batch, average: bool = False) -> Tensor:
    """TRL's memory-saving form, row by row."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    logits = logits / 0.9
    index = batch["input_ids"][:, 1:]
    mask = batch["labels"][:, 1:] != -100
    selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    normaliser = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    per_token = (selected - normaliser) * mask
    return per_token.sum(-1) / (mask.sum(-1) if average else 1)


def by_cross_entropy(model: nn.Module, batch: Batch, average: bool = False) -> Tensor:
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    per_token = -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return per_token.sum(1) / ((labels != -100).sum(1) if average else 1)


def by_loop(model: nn.Module, batch: Batch, average: bool = False) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    found = []
    for logit, label in zip(logits[:, :-1], batch["labels"][:, 1:], strict=True):
        keep = label != -100
        logp = F.log_softmax(logit[keep], dim=-1)
        picked = logp[torch.arange(int(keep.sum())), label[keep]]
        found.append(picked.mean() if average else picked.sum())
    return torch.stack(found)


STYLES = [by_gather, by_selective_log_softmax, by_cross_entropy, by_loop]


# -- losses ----------------------------------------------------------------------------------------------------------


class Preferring(L.LightningModule):
    def __init__(self, loss: Callable[[Preferring, Any], Tensor], logps: Callable[..., Tensor] = by_gather) -> None:
        super().__init__()
        self.policy = causal_lm("qwen2")
        self.reference = copy.deepcopy(self.policy).eval().requires_grad_(False)
        with torch.no_grad():
            for p in self.reference.parameters():
                p.mul_(0.9)
        self.loss, self.logps = loss, logps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self, batch)

    def of_reference(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self.logps(self.reference, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.parameters(), 0.05)


def dpo(m: Preferring, batch: Any) -> Tensor:
    chosen, rejected = m.logps(m.policy, batch["chosen"]), m.logps(m.policy, batch["rejected"])
    margin = (chosen - rejected) - (m.of_reference(batch["chosen"]) - m.of_reference(batch["rejected"]))
    m.log("accuracy", (margin > 0).float().mean(), batch_size=1)
    return -F.logsigmoid(0.1 * margin).mean()


def kto(m: Preferring, batch: Any) -> Tensor:
    ratio = m.logps(m.policy, batch["chosen"]) - m.of_reference(batch["chosen"])
    with torch.no_grad():
        kl = (m.logps(m.policy, batch["rejected"]) - m.of_reference(batch["rejected"])).mean().clamp(min=0)
    sign = torch.where(batch["kind"], 1.0, -1.0)
    return (1 - torch.sigmoid(0.1 * sign * (ratio - kl))).mean()


def orpo(m: Preferring, batch: Any) -> Tensor:
    chosen, rejected = (m.logps(m.policy, batch[k], average=True) for k in ("chosen", "rejected"))
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -chosen.mean() - 0.1 * F.logsigmoid(odds).mean()


def simpo(m: Preferring, batch: Any) -> Tensor:
    chosen, rejected = (m.logps(m.policy, batch[k], average=True) for k in ("chosen", "rejected"))
    return -F.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean()


def cpo(m: Preferring, batch: Any) -> Tensor:
    chosen, rejected = m.logps(m.policy, batch["chosen"]), m.logps(m.policy, batch["rejected"])
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean() - chosen.mean()


LOSSES = [dpo, kto, orpo, simpo, cpo]


def assert_chunked(run: Any, *, models: int) -> None:
    head, padding = run.report["fused_head"], run.report["padding_free"]
    assert head["materialised_by"] == {}
    assert head["applied"] == models and head["fused_calls"] > 0
    assert padding["packed_calls"] == padding["calls"] > 0 and padding["extra_padded_runs"] == 0


CASES = [(loss, by_gather) for loss in LOSSES] + [(loss, style) for loss in (dpo, orpo) for style in STYLES[1:]]


@pytest.mark.parametrize(("loss", "style"), CASES, ids=lambda f: f.__name__)
def test_losses(loss: Callable[..., Tensor], style: Callable[..., Tensor]) -> None:
    plain, ours = both(lambda: Preferring(loss, style), data)
    assert_same(plain, ours)
    assert len(set(plain.losses)) > 1
    assert_chunked(ours, models=2)


def concatenated(m: Preferring, batch: Any) -> Tensor:
    """One forward pass for both answers, split afterwards."""
    longest = max(batch[k]["input_ids"].shape[1] for k in ("chosen", "rejected"))
    fill = {"input_ids": PAD, "attention_mask": 0, "labels": -100}
    both_ = {
        k: torch.cat([F.pad(batch[w][k], (0, longest - batch[w][k].shape[1]), value=v) for w in ("chosen", "rejected")])
        for k, v in fill.items()
    }
    chosen, rejected = m.logps(m.policy, both_).chunk(2)
    ref_chosen, ref_rejected = m.of_reference(both_).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected - ref_chosen + ref_rejected)).mean()


def logits_of_two_calls(m: Preferring, batch: Any) -> Tensor:
    """Logits joined before anybody reads them."""
    labels = [batch[k]["labels"][:, 1:].reshape(-1) for k in ("chosen", "rejected")]
    flat = []
    for k in ("chosen", "rejected"):
        out = m.policy(input_ids=batch[k]["input_ids"], attention_mask=batch[k]["attention_mask"]).logits
        flat.append(out[:, :-1].reshape(-1, out.size(-1)))
    losses = F.cross_entropy(torch.cat(flat), torch.cat(labels), reduction="none")
    chosen, rejected = losses.split([len(labels[0]), len(labels[1])])
    return F.softplus(0.1 * (chosen.sum() - rejected.sum()))


def grpo(m: Preferring, batch: Any) -> Tensor:
    """Clipped ratio, k3 estimate of the KL to the reference, and an entropy bonus on the answers' tokens."""
    b = batch["chosen"]
    logits = m.policy(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits[:, :-1] / 0.8
    with torch.no_grad():
        ref = m.reference(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits[:, :-1] / 0.8
        ref_logp = ref.log_softmax(-1).gather(-1, b["input_ids"][:, 1:, None]).squeeze(-1)
    logp_all = F.log_softmax(logits, dim=-1)
    logp = logp_all.gather(-1, b["input_ids"][:, 1:, None]).squeeze(-1)
    mask = (b["labels"][:, 1:] != -100).float()
    entropy = -(logp_all.exp() * logp_all).sum(-1)
    ratio = torch.exp(logp - logp.detach())
    advantage = batch["advantage"][:, None]
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    kl = torch.exp(ref_logp - logp) - (ref_logp - logp) - 1
    per_token = -(gain - 0.04 * kl) - 0.01 * entropy
    return ((per_token * mask).sum(-1) / mask.sum(-1)).mean()


def distil(m: Preferring, batch: Any) -> Tensor:
    """Cross entropy and a KL to a teacher with the same vocabulary, at the answers' tokens."""
    b = batch["chosen"]
    mask = b["labels"][:, 1:] != -100
    student = m.policy(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits[:, :-1]
    with torch.no_grad():
        teacher = m.reference(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits[:, :-1]
    hard = F.cross_entropy(student.flatten(0, 1), b["labels"][:, 1:].flatten())
    soft = F.kl_div(F.log_softmax(student / 2, -1), F.softmax(teacher / 2, -1), reduction="none").sum(-1)
    selected = F.kl_div(
        student[mask].log_softmax(-1), teacher[mask].log_softmax(-1), reduction="batchmean", log_target=True
    )
    return hard + 4 * (soft * mask).sum() / mask.sum() + 0.1 * selected


@pytest.mark.parametrize("loss", [concatenated, logits_of_two_calls, grpo, distil], ids=lambda f: f.__name__)
def test_other_shapes(loss: Callable[..., Tensor]) -> None:
    plain, ours = both(lambda: Preferring(loss), data)
    assert_same(plain, ours)
    assert_chunked(ours, models=2)


def reads_padding(m: Preferring, batch: Any) -> Tensor:
    """Not masked: padded positions count, and must count as they do in the padded run."""
    b = batch["chosen"]
    logits = m.policy(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits
    return -logits.log_softmax(-1).gather(-1, b["input_ids"][..., None]).mean()


def test_padding_that_counts_does_count() -> None:
    plain, ours = both(lambda: Preferring(reads_padding), data)
    assert_same(plain, ours)
    assert ours.report["padding_free"]["extra_padded_runs"] > 0
    assert ours.report["fused_head"]["materialised_by"] == {}
