"""Training steps as they are found in public repositories, each a function from ``(module, batch)`` to a loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import PAD, VOCAB
from torch import Tensor


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    labels = labels[:, 1:].clone()
    mask = labels != -100
    labels[~mask] = 0
    picked = torch.gather(logits[:, :-1].log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (picked * mask).sum(-1)


# -- losses ----------------------------------------------------------------------------------------------------------


def per_token_loss_times_mask(m: Any, b: Any) -> Any:
    logits = m.model(**inputs(b)).logits
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), b["input_ids"][:, 1:].reshape(-1), reduction="none")
    mask = b["attention_mask"][:, 1:].reshape(-1).float()
    return (loss * mask).sum() / mask.sum()


def pad_is_ignored(m: Any, b: Any) -> Any:
    logits = m.model(**inputs(b)).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), b["input_ids"][:, 1:].flatten(), ignore_index=PAD)


def padding_is_scored(m: Any, b: Any) -> Any:
    return m.model(**inputs(b), labels=b["input_ids"]).loss


def mask_of_ones_over_padding(m: Any, b: Any) -> Any:
    return m.model(b["input_ids"], attention_mask=torch.ones_like(b["input_ids"]), labels=b["labels"]).loss


def no_mask(m: Any, b: Any) -> Any:
    return m.model(b["input_ids"], labels=b["labels"]).loss


def bool_mask(m: Any, b: Any) -> Any:
    return m.model(b["input_ids"], attention_mask=b["input_ids"] != PAD, labels=b["labels"]).loss


def float_mask(m: Any, b: Any) -> Any:
    return m.model(b["input_ids"], attention_mask=b["attention_mask"].float(), labels=b["labels"]).loss


def nll_of_log_softmax(m: Any, b: Any) -> Any:
    logp = F.log_softmax(m.model(**inputs(b)).logits[:, :-1].float(), dim=-1)
    return F.nll_loss(logp.transpose(1, 2), b["labels"][:, 1:], ignore_index=-100)


def label_smoothing_and_class_weights(m: Any, b: Any) -> Any:
    weight = torch.linspace(0.5, 1.5, VOCAB)
    logits = m.model(**inputs(b)).logits[:, :-1].permute(0, 2, 1)
    return nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)(logits, b["labels"][:, 1:])


def summed_over_items(m: Any, b: Any) -> Any:
    return m.model(**b, num_items_in_batch=torch.tensor(7)).loss


def z_loss_and_entropy(m: Any, b: Any) -> Any:
    out = m.model(**b)
    logits = out.logits[b["labels"] != -100]
    p = logits.softmax(-1)
    entropy = -(p * logits.log_softmax(-1)).sum(-1).mean()
    return out.loss + 1e-2 * logits.logsumexp(-1).pow(2).mean() - 1e-2 * entropy


def banned_token(m: Any, b: Any) -> Any:
    logits = m.model(**inputs(b)).logits
    logits[:, :, PAD] = -1e4
    logits = logits / 0.7
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), b["labels"][:, 1:].reshape(-1))


class _Penalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        extra = torch.zeros_like(logits)
        top, ids = logits.max(-1, keepdim=True)
        extra.scatter_(-1, ids, top * 1e-3 / logits.shape[0])
        return grad, extra


def gradient_added_to_the_logits(m: Any, b: Any) -> Any:
    out = m.model(**b)
    return _Penalised.apply(out.loss, out.logits)


def accuracy_and_perplexity(m: Any, b: Any) -> Any:
    out = m.model(**b)
    with torch.no_grad():
        predicted, labels = out.logits[:, :-1].argmax(-1), b["labels"][:, 1:]
        scored = labels != -100
        m.log("accuracy", (predicted[scored] == labels[scored]).float().mean())
        m.log("confidence", out.logits.softmax(-1).max(-1).values[b["attention_mask"].bool()].mean())
        m.log("perplexity", out.loss.exp())
        m.log("raw_mean", out.logits.float().mean())
    return out.loss


def labels_rewritten_in_the_batch(m: Any, b: Any) -> Any:
    b["labels"] = b["input_ids"].clone()
    b["labels"][b["labels"] == PAD] = -100
    return m.model(**b).loss


def hooked_logits(m: Any, b: Any) -> Any:
    logits = m.model(**inputs(b)).logits
    logits.register_hook(lambda g: g * 0.5)
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), b["labels"][:, 1:].reshape(-1))


def keeps_its_logits(m: Any, b: Any) -> Any:
    """Logits and log-probabilities are read after the optimizer has moved on."""
    kept = m.__dict__.setdefault("kept", [])
    if kept:
        logits, logp = kept[-1]
        m.log("last_logits", logits.float().pow(2).mean())
        m.log("last_logp", logp.mean())
    out = m.model(**b)
    labels = b["labels"].clamp_min(0)
    logp = out.logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    kept.append((out.logits.detach(), logp.detach()))
    return out.loss


# -- hidden states ---------------------------------------------------------------------------------------------------


def reward_from_the_last_column(m: Any, b: Any) -> Any:
    hidden = m.model(**inputs(b), output_hidden_states=True).hidden_states[-1]
    return hidden[:, -1, :].pow(2).mean()


def reward_from_the_last_token(m: Any, b: Any) -> Any:
    hidden = m.model.model(**inputs(b)).last_hidden_state
    rows = torch.arange(hidden.shape[0])
    return hidden[rows, b["attention_mask"].sum(1) - 1].pow(2).mean()


def mean_over_everything(m: Any, b: Any) -> Any:
    return m.model.model(**inputs(b)).last_hidden_state.mean(1).pow(2).mean()


def mean_over_the_mask(m: Any, b: Any) -> Any:
    hidden = m.model.model(**inputs(b))[0]
    mask = b["attention_mask"].unsqueeze(-1).float()
    pooled = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    return F.cross_entropy(pooled @ pooled.T / 0.1, torch.arange(pooled.shape[0]))


def head_on_chosen_rows(m: Any, b: Any) -> Any:
    hidden = m.model.model(**inputs(b)).last_hidden_state[:, :-1]
    scored = b["labels"][:, 1:] != -100
    return F.cross_entropy(m.model.lm_head(hidden[scored]), b["labels"][:, 1:][scored])


def all_layers(m: Any, b: Any) -> Any:
    out = m.model(**b, output_hidden_states=True)
    layers = torch.stack(out.hidden_states, 0)
    return out.loss + 1e-3 * (layers * b["attention_mask"][None, :, :, None]).pow(2).mean()


def embedded_prompt(m: Any, b: Any) -> Any:
    embedded = m.model.get_input_embeddings()(b["input_ids"])
    prompt = torch.full((embedded.shape[0], 3, embedded.shape[2]), 0.02, dtype=embedded.dtype)
    mask = torch.cat([torch.ones(embedded.shape[0], 3, dtype=torch.long), b["attention_mask"]], 1)
    labels = torch.cat([torch.full((embedded.shape[0], 3), -100), b["labels"]], 1)
    return m.model(inputs_embeds=torch.cat([prompt, embedded], 1), attention_mask=mask, labels=labels).loss


def twice_with_a_kl(m: Any, b: Any) -> Any:
    first, second = m.model(**b), m.model(**b)
    scored = b["labels"][:, 1:] != -100
    p, q = (o.logits[:, :-1][scored].log_softmax(-1) for o in (first, second))
    return first.loss + second.loss + F.kl_div(p, q, log_target=True, reduction="batchmean")


def positions_from_the_mask(m: Any, b: Any) -> Any:
    positions = (b["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    return m.model(**b, position_ids=positions).loss


def with_a_cache(m: Any, b: Any) -> Any:
    out = m.model(**b, use_cache=True)
    return out.loss + 0.0 * out.past_key_values.get_seq_length()


def four_dimensional_mask(m: Any, b: Any) -> Any:
    mask = b["attention_mask"]
    n = mask.shape[1]
    allowed = torch.ones(n, n).tril().bool()[None, None] & mask[:, None, None, :].bool()
    allowed = allowed | torch.eye(n, dtype=torch.bool)
    return m.model(b["input_ids"], attention_mask=allowed, labels=b["labels"]).loss


STEPS = [
    per_token_loss_times_mask,
    pad_is_ignored,
    padding_is_scored,
    mask_of_ones_over_padding,
    no_mask,
    bool_mask,
    float_mask,
    nll_of_log_softmax,
    label_smoothing_and_class_weights,
    summed_over_items,
    z_loss_and_entropy,
    banned_token,
    gradient_added_to_the_logits,
    accuracy_and_perplexity,
    labels_rewritten_in_the_batch,
    hooked_logits,
    keeps_its_logits,
    reward_from_the_last_column,
    reward_from_the_last_token,
    mean_over_everything,
    mean_over_the_mask,
    head_on_chosen_rows,
    all_layers,
    embedded_prompt,
    twice_with_a_kl,
    positions_from_the_mask,
    with_a_cache,
    four_dimensional_mask,
]

# Steps whose padded positions nobody depends on: they must end up without padding, whatever way that is found out.
UNREAD = [
    per_token_loss_times_mask,
    pad_is_ignored,
    bool_mask,
    float_mask,
    nll_of_log_softmax,
    label_smoothing_and_class_weights,
    z_loss_and_entropy,
    labels_rewritten_in_the_batch,
    reward_from_the_last_token,
    mean_over_the_mask,
    head_on_chosen_rows,
    embedded_prompt,
    twice_with_a_kl,
    positions_from_the_mask,
]
