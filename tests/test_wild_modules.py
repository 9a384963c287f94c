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
from wild_steps import STEPS, UNREAD, inputs, log_probs, nll_of_log_softmax, no_mask, pad_is_ignored

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


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
def test_a_step_of_its_own_kind(step: Any, side: str) -> None:
    function = collate if side == "right" else collate_left
    plain, ours = both(lambda: Wild(causal_lm("llama"), step), lambda: loader(function))
    assert_same(plain, ours)
    for name, value in plain.metrics.items():
        if not name.startswith("liger/"):
            assert ours.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("step", UNREAD, ids=lambda s: s.__name__)
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
        policy = log_probs(self.policy(**inputs(batch)).logits, batch["labels"])
        with torch.no_grad():
            reference = log_probs(self.reference(**inputs(batch)).logits, batch["labels"])
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
        return self.model(**inputs(batch), labels=labels).loss

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
