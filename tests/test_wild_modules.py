"""Modules as they are found in public repositories, each with a habit of its own: plain and accelerated are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from helpers import PAD, VOCAB, Plain, assert_same, both, causal_lm, collate, collate_left, config, loader
from torch import Tensor

from lightning_liger.head.pending import settle_pending


class Wild(Plain):
    """A module made of a model and one function from ``(module, batch)`` to a loss."""

    def __init__(self, model: nn.Module, step: Callable[[Any, Any], Any], lr: float = 0.05) -> None:
        super().__init__(model, lr)
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    labels = labels[:, 1:].clone()
    mask = labels != -100
    labels[~mask] = 0
    picked = torch.gather(logits[:, :-1].log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (picked * mask).sum(-1)


# -- losses ----------------------------------------------------------------------------------------------------------


def per_token_loss_times_mask(m: Any, b: Any) -> Any:
    logits = m.model(**_inputs(b)).logits
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), b["input_ids"][:, 1:].reshape(-1), reduction="none")
    mask = b["attention_mask"][:, 1:].reshape(-1).float()
    return (loss * mask).sum() / mask.sum()


def pad_is_ignored(m: Any, b: Any) -> Any:
    logits = m.model(**_inputs(b)).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), b["input_ids"][:, 1:].flatten(), ignore_index=PAD)


def padding_is_scored(m: Any, b: Any) -> Any:
    return m.model(**_inputs(b), labels=b["input_ids"]).loss


def mask_of_ones_over_padding(m: Any, b: Any) -> Any:
    return m.model(b["input_ids"], attention_mask=torch.ones_like(b["input_ids"]), labels=b["labels"]).loss


def no_mask(m: Any, b: Any) -> Any:
    return m.model(b["input_ids"], labels=b["labels"]).loss


def bool_mask(m: Any, b: Any) -> Any:
    return m.model(b["input_ids"], attention_mask=b["input_ids"] != PAD, labels=b["labels"]).loss


def float_mask(m: Any, b: Any) -> Any:
    return m.model(b["input_ids"], attention_mask=b["attention_mask"].float(), labels=b["labels"]).loss


def nll_of_log_softmax(m: Any, b: Any) -> Any:
    logp = F.log_softmax(m.model(**_inputs(b)).logits[:, :-1].float(), dim=-1)
    return F.nll_loss(logp.transpose(1, 2), b["labels"][:, 1:], ignore_index=-100)


def label_smoothing_and_class_weights(m: Any, b: Any) -> Any:
    weight = torch.linspace(0.5, 1.5, VOCAB)
    logits = m.model(**_inputs(b)).logits[:, :-1].permute(0, 2, 1)
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
    logits = m.model(**_inputs(b)).logits
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
    logits = m.model(**_inputs(b)).logits
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
    hidden = m.model(**_inputs(b), output_hidden_states=True).hidden_states[-1]
    return hidden[:, -1, :].pow(2).mean()


def reward_from_the_last_token(m: Any, b: Any) -> Any:
    hidden = m.model.model(**_inputs(b)).last_hidden_state
    rows = torch.arange(hidden.shape[0])
    return hidden[rows, b["attention_mask"].sum(1) - 1].pow(2).mean()


def mean_over_everything(m: Any, b: Any) -> Any:
    return m.model.model(**_inputs(b)).last_hidden_state.mean(1).pow(2).mean()


def mean_over_the_mask(m: Any, b: Any) -> Any:
    hidden = m.model.model(**_inputs(b))[0]
    mask = b["attention_mask"].unsqueeze(-1).float()
    pooled = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    return F.cross_entropy(pooled @ pooled.T / 0.1, torch.arange(pooled.shape[0]))


def head_on_chosen_rows(m: Any, b: Any) -> Any:
    hidden = m.model.model(**_inputs(b)).last_hidden_state[:, :-1]
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


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
def test_a_step_of_its_own_kind(step: Any, side: str) -> None:
    function = collate if side == "right" else collate_left
    plain, ours = both(lambda: Wild(causal_lm("llama"), step), lambda: loader(function))
    assert_same(plain, ours)
    for name, value in plain.metrics.items():
        if not name.startswith("liger/"):
            assert ours.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


# Steps whose padded positions nobody depends on must end up without padding, whatever way that is found out.
@pytest.mark.parametrize(
    "step",
    [
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
    ],
    ids=lambda s: s.__name__,
)
def test_padding_goes_where_nobody_reads_it(step: Any) -> None:
    plain, ours = both(lambda: Wild(causal_lm("llama"), step), lambda: loader(count=24), max_steps=6)
    assert_same(plain, ours)
    report = ours.report["padding_free"]
    assert report["packed_calls"] >= 5, report


def test_nothing_is_held_when_the_optimizer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that nobody kept must be gone by then, or every step would compute them."""
    import lightning_liger.callback as callback

    counts: list[int] = []

    def count() -> int:
        counts.append(settle_pending())
        return counts[-1]

    monkeypatch.setattr(callback, "settle_pending", count)
    both(lambda: Wild(causal_lm("llama"), pad_is_ignored), loader)
    both(lambda: Wild(causal_lm("llama"), nll_of_log_softmax), loader)
    both(Preference, loader)
    assert counts == [0] * 12


# -- models ----------------------------------------------------------------------------------------------------------


class Preference(L.LightningModule):
    """DPO as it is written by hand, the reference a frozen copy inside the module."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = causal_lm("llama")
        self.reference = copy.deepcopy(self.policy).eval().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        half = batch["input_ids"].shape[0] // 2
        policy = _log_probs(self.policy(**_inputs(batch)).logits, batch["labels"])
        with torch.no_grad():
            reference = _log_probs(self.reference(**_inputs(batch)).logits, batch["labels"])
        margin = (policy - reference)[:half] - (policy - reference)[half:]
        return -F.logsigmoid(0.1 * margin).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.parameters(), 0.05)


def test_preference_optimisation() -> None:
    plain, ours = both(Preference, loader)
    assert_same(plain, ours)
    assert ours.report["padding_free"]["packed_calls"] > 0


class Classifier(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "pad_token_id": PAD,
            "num_labels": 3,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }
        made = {
            "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)),
            "roberta": lambda: transformers.RobertaForSequenceClassification(
                transformers.RobertaConfig(**sizes, max_position_embeddings=64)
            ),
            "distilbert": lambda: transformers.DistilBertForSequenceClassification(
                transformers.DistilBertConfig(
                    vocab_size=VOCAB,
                    dim=32,
                    n_layers=2,
                    n_heads=4,
                    hidden_dim=48,
                    num_labels=3,
                    dropout=0.0,
                    attention_dropout=0.0,
                    seq_classif_dropout=0.0,
                    pad_token_id=PAD,
                )
            ),
            "qwen2": lambda: transformers.Qwen2ForSequenceClassification(config("qwen2", num_labels=3)),
            "bert-mlm": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
            "t5": lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    vocab_size=VOCAB,
                    d_model=32,
                    d_kv=8,
                    d_ff=48,
                    num_layers=2,
                    num_heads=4,
                    dropout_rate=0.0,
                    pad_token_id=PAD,
                    decoder_start_token_id=PAD,
                )
            ),
        }
        torch.manual_seed(0)
        self.kind = kind
        self.model = made[kind]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.kind in ("bert-mlm", "t5"):
            return self.model(**batch).loss
        labels = batch["attention_mask"].sum(1) % 3
        return self.model(**_inputs(batch), labels=labels).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "qwen2", "bert-mlm", "t5"])
def test_models_of_other_kinds(kind: str) -> None:
    plain, ours = both(lambda: Classifier(kind), loader)
    assert_same(plain, ours)


class TwoOptimizers(Wild):
    """Manual optimization, one optimizer for the head and one for the rest."""

    def __init__(self) -> None:
        super().__init__(causal_lm("llama"), no_mask)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        body, head = self.optimizers()  # type: ignore[misc]
        loss = self.model(**batch).loss
        self.manual_backward(loss)
        self.clip_gradients(body, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        for optimizer in (body, head):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        head = list(self.model.lm_head.parameters())
        rest = [p for p in self.parameters() if all(p is not q for q in head)]
        return [torch.optim.SGD(rest, 0.05), torch.optim.SGD(head, 0.1)]


def test_manual_optimization_with_two_optimizers() -> None:
    plain, ours = both(TwoOptimizers, loader)
    assert_same(plain, ours)
    assert ours.report["padding_free"]["packed_calls"] == len(ours.losses)


class OwnDecoder(L.LightningModule):
    """A decoder from scratch that answers ``(logits, loss)``, as nanoGPT does, tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCAB, 32), nn.Embedding(32, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        n = ids.shape[1]
        x = self.tokens(ids) + self.places(torch.arange(n))
        causal = nn.Transformer.generate_square_subsequent_mask(n)
        logits = self.head(self.norm(self.blocks(x, mask=causal, is_causal=True)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        targets = torch.full_like(batch["labels"], -1)
        targets[:, :-1] = batch["labels"][:, 1:].masked_fill(batch["labels"][:, 1:] == -100, -1)
        return self(batch["input_ids"], targets)[1]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def test_a_decoder_from_scratch() -> None:
    plain, ours = both(OwnDecoder, loader)
    assert_same(plain, ours)
    assert ours.report["fused_head"]["fused_calls"] == 4
