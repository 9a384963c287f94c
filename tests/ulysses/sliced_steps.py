"""Steps on raw modules, as people write them, for comparing slices of tokens on several ranks with one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from helpers import PAD, causal_lm, collate, config, documents
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Batch = dict[str, Tensor]


def batch(count: int = 5, seed: int = 3, side: str = "right") -> Batch:
    return collate(documents(count, seed), side)


def pairs() -> Batch:
    return collate(documents(6, seed=8))


def packed(numbered: bool = False) -> Batch:
    """Documents in two rows, that the collate function has packed: positions restart, and perhaps a mask numbers them."""
    rows = [documents(3, seed=s) for s in (1, 4)]
    length = max(sum(len(d.ids) for d in row) for row in rows)
    ids, positions = torch.full((2, length), PAD), torch.zeros(2, length, dtype=torch.int64)
    number, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for r, row in enumerate(rows):
        at = 0
        for i, d in enumerate(row):
            part = slice(at, at + len(d.ids))
            ids[r, part], positions[r, part], number[r, part] = d.ids, torch.arange(len(d.ids)), i + 1
            labels[r, at + max(d.prompt, 1) : part.stop] = d.ids[max(d.prompt, 1) :]
            at = part.stop
        positions[r, at:] = torch.arange(length - at)
    made = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {**made, "attention_mask": number} if numbered else made


# -- models --------------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    **{name: getattr(config("llama"), name) for name in ("vocab_size", "hidden_size", "intermediate_size")},
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "max_position_embeddings": 64,
}


def model(kind: str, **changes: Any) -> Any:
    if kind == "mistral":
        made: Any = transformers.MistralConfig(**SIZES, sliding_window=8)
    elif kind == "gpt_oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8}
        made = transformers.GptOssConfig(**SIZES, **experts)
    elif kind == "mixtral":
        made = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    else:
        return causal_lm(kind, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(made, **changes).train()


def of_class(kind: str, base: str = "llama", **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, kind).from_config(config(base, classifier_dropout=0.0, **changes)).train()


class Preference(nn.Module):
    """A policy, and the frozen model that it began as."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = causal_lm("qwen2", seed=1)
        self.reference = causal_lm("qwen2", seed=5).eval().requires_grad_(False)


class Both(nn.Module):
    """Two backbones of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = causal_lm("llama"), causal_lm("gpt2")


class Valued(nn.Module):
    """A value head with dropout off on every token, as PPO has it, and a reward at each last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.model = causal_lm("llama")
        self.value = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
        self.reward = nn.Linear(32, 1)


def adapted(**options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = get_peft_model(causal_lm("llama"), LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, **options))
    return made.train()


def recomputed(reentrant: bool) -> Any:
    made = causal_lm("qwen2")
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    made.enable_input_require_grads()
    return made


# -- steps ---------------------------------------------------------------------------------------------------------------


def by_labels(m: Any, b: Batch) -> Tensor:
    loss: Tensor = m(**b).loss
    return loss


def logits_of(m: Any, b: Batch) -> Tensor:
    logits: Tensor = m(**{k: v for k, v in b.items() if k != "labels"}).logits
    return logits


def own_loss(m: Any, b: Batch) -> Tensor:
    logits = logits_of(m, b)
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), b["labels"][:, 1:].reshape(-1))


def weighted_loss(m: Any, b: Batch) -> Tensor:
    """Smoothed, per token, weighted by hand, and of classes that weigh differently."""
    logits, labels = logits_of(m, b)[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten()
    each = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    classes = torch.linspace(0.5, 1.5, logits.shape[-1], dtype=logits.dtype)
    return (each * torch.linspace(0, 1, len(each))).sum() + F.cross_entropy(logits, labels, classes)


def log_probabilities(m: Any, b: Batch) -> Tensor:
    labels = b["labels"][:, 1:]
    logp = logits_of(m, b)[:, :-1].log_softmax(-1)
    chosen = logp.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    found: Tensor = (chosen * (labels >= 0)).sum(-1)
    return found


def preference(m: Preference, b: Batch) -> Tensor:
    with torch.no_grad():
        before = log_probabilities(m.reference, b)
    ratio = log_probabilities(m.policy, b) - before
    return -F.logsigmoid(0.3 * (ratio[::2] - ratio[1::2])).mean()


def concatenated(m: Preference, b: Batch) -> Tensor:
    """Two calls, of which the logits are put together, and a divergence from the reference."""
    halves = [{k: v[i::2] for k, v in b.items()} for i in range(2)]
    logits = torch.cat([logits_of(m.policy, half) for half in halves])
    labels = torch.cat([half["labels"] for half in halves])
    with torch.no_grad():
        other = torch.cat([logits_of(m.reference, half) for half in halves])
    keep = labels[:, 1:] >= 0
    p, q = logits[:, :-1].log_softmax(-1), other[:, :-1].log_softmax(-1)
    divergence = ((p.exp() * (p - q)).sum(-1) * keep).sum() / keep.sum()
    return divergence + F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def readers(m: Any, b: Batch) -> Tensor:
    """All kinds of answers per row: an entropy, a z-loss, the best ids, whole rows."""
    logits, keep = logits_of(m, b)[:, :-1], b["labels"][:, 1:] >= 0
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    norm = logits.logsumexp(-1)
    best, ids = logits.topk(3, dim=-1)
    assert torch.equal(ids[..., 0][keep], logits.argmax(-1)[keep])
    right = (ids[..., 0] == b["labels"][:, 1:])[keep].to(logits.dtype).mean()
    rows = logits[keep][:7]
    loss = own_loss(m, b)
    return ((0.1 * entropy + 0.01 * norm**2 + best.sum(-1)) * keep).mean() + right.detach() + rows.tanh().mean() + loss


def hidden_states(m: Any, b: Batch) -> Tensor:
    output = m(input_ids=b["input_ids"], attention_mask=b["attention_mask"], output_hidden_states=True)
    last = b["attention_mask"].sum(1) - 1
    picked = output.hidden_states[-1][torch.arange(len(last)), last]
    middle = output.hidden_states[1] * b["attention_mask"][..., None]
    return picked.pow(2).mean() + middle.pow(2).mean()


def values_and_rewards(m: Valued, b: Batch) -> Tensor:
    hidden = m.model.model(b["input_ids"], attention_mask=b["attention_mask"]).last_hidden_state
    values = m.value(hidden).squeeze(-1)
    last = b["attention_mask"].sum(1) - 1
    reward = m.reward(hidden[torch.arange(len(last)), last])
    returns = torch.linspace(-1, 1, values.shape[1], dtype=values.dtype)
    error = ((values - returns) ** 2 * b["attention_mask"]).sum() / b["attention_mask"].sum()
    return error + reward.tanh().mean()


def in_sequence(m: Any, b: Batch) -> Tensor:
    return m(input_ids=b["input_ids"], attention_mask=b["attention_mask"], labels=torch.arange(5) % 2).loss


def by_token(m: Any, b: Batch) -> Tensor:
    labels = torch.where(b["labels"] >= 0, b["labels"] % 2, -100)
    return m(input_ids=b["input_ids"], attention_mask=b["attention_mask"], labels=labels).loss


def both(m: Both, b: Batch) -> Tensor:
    return own_loss(m.one, b) + 0.3 * own_loss(m.two, b)


def accumulated(m: Any, b: Batch) -> Tensor:
    total = torch.zeros(())
    for i in range(3):
        loss = own_loss(m, {k: v[i : i + 2] for k, v in b.items()}) / 3
        loss.backward()
        total = total + loss.detach()
    return total.requires_grad_()


def few_labels(m: Any, b: Batch) -> Tensor:
    """Fewer rows than ranks, all at the end of one slice."""
    labels = torch.full_like(b["labels"], -100)
    labels[-1, 2] = 7
    return own_loss(m, {**b, "labels": labels})


def recomputed_loss(m: Any, b: Batch) -> Tensor:
    """The loss of the user's own checkpoint around the head."""
    hidden = m.model(b["input_ids"], attention_mask=b["attention_mask"]).last_hidden_state

    def loss(hidden: Tensor) -> Tensor:
        return F.cross_entropy(m.lm_head(hidden)[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())

    found: Tensor = checkpoint(loss, hidden, use_reentrant=False)
    return found


def evaluated(m: Any, b: Batch) -> Tensor:
    """A validation step and what it scores, then a training step."""
    m.eval()
    with torch.no_grad():
        logits = logits_of(m, b)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())
        right = (logits.argmax(-1)[:, :-1] == b["labels"][:, 1:]).sum()
    m.train()
    return own_loss(m, b) + loss + right
