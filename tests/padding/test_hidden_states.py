"""Heads and losses on hidden states: what they read decides, not what they are called."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers as hf
from comparing import PAD, VOCAB, all_packed, batch, compare, sharpened
from torch import Tensor

from lightning_liger.accelerate import accelerate

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "num_labels": 3,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}


def encoder_config(kind: str) -> Any:
    if kind == "distilbert":
        own = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
        own |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": PAD, "num_labels": 3}
        return hf.DistilBertConfig(**own, seq_classif_dropout=0.0)
    if kind == "modernbert":
        return hf.ModernBertConfig(**SIZES, local_attention=8, cls_token_id=2, sep_token_id=3)
    classes = {"bert": hf.BertConfig, "roberta": hf.RobertaConfig, "electra": hf.ElectraConfig}
    return classes[kind](**SIZES, **NO_DROPOUT)


def causal_config(kind: str = "llama") -> Any:
    return {"llama": hf.LlamaConfig, "qwen2": hf.Qwen2Config}[kind](**SIZES, num_key_value_heads=2)


def build(auto: Any, config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return sharpened(auto.from_config(config))


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert", "electra"])
@pytest.mark.parametrize("left", [False, True])
def test_masked_language_models(kind: str, left: bool) -> None:
    model = build(hf.AutoModelForMaskedLM, encoder_config(kind))
    report = compare(model, lambda m, b: m(**b).loss, batch(left=left), batch((9, 3), left=left, seed=1))
    assert all_packed(report)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert"])
def test_token_classification(kind: str) -> None:
    model = build(hf.AutoModelForTokenClassification, encoder_config(kind))
    inputs = batch()
    inputs["labels"] = torch.where(inputs["labels"] < 0, -100, inputs["labels"] % 3)
    assert all_packed(compare(model, lambda m, b: m(**b).loss, inputs))


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_sequence_classification_by_first_token(kind: str) -> None:
    model = build(hf.AutoModelForSequenceClassification, encoder_config(kind))
    inputs = {**batch(), "labels": torch.tensor([0, 2, 1])}
    assert all_packed(compare(model, lambda m, b: m(**b).loss, inputs))


def test_a_pooler_on_the_left_reads_padding_and_is_given_it() -> None:
    model = build(hf.AutoModelForSequenceClassification, encoder_config("bert"))
    inputs = {**batch(left=True), "labels": torch.tensor([0, 2, 1])}
    report = compare(model, lambda m, b: m(**b).loss, inputs, inputs)
    assert report.packed_calls == report.padded_runs == 1 and "reads padded positions" in report.off[0]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_sequence_classification_by_last_token(kind: str, left: bool) -> None:
    model = build(hf.AutoModelForSequenceClassification, causal_config(kind))
    inputs = {**batch(left=left), "labels": torch.tensor([0, 2, 1])}
    assert all_packed(compare(model, lambda m, b: m(**b).loss, inputs))


class OnHiddenStates(nn.Module):
    """A backbone and a head of its own, as reward and embedding models have."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = hf.AutoModel.from_config(config)
        self.head = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.LayerNorm(16), nn.Dropout(0.0), nn.Linear(16, 1))

    def hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.backbone(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state


def reward_of_last(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    hidden = model.hidden(inputs)
    last = inputs["attention_mask"].sum(1) - 1
    return F.logsigmoid(model.head(hidden[torch.arange(hidden.shape[0]), last])).mean()


def reward_everywhere_then_last(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    scores = model.head(model.hidden(inputs))
    last = inputs["attention_mask"].sum(1) - 1
    return F.logsigmoid(scores[torch.arange(scores.shape[0]), last, 0]).mean()


def reward_picked_then_squeezed(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    scores = model.head(model.hidden(inputs))
    last = inputs["attention_mask"].sum(1) - 1
    return F.logsigmoid(scores[torch.arange(scores.shape[0]), last].squeeze(-1)).mean()


def values_under_a_mask(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    values = model.head(model.hidden(inputs)).squeeze(-1)
    mask = inputs["attention_mask"]
    return ((values - 1).square() * mask).sum() / mask.sum()


def masked_mean(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    mask = inputs["attention_mask"].unsqueeze(-1).double()
    return model.head((model.hidden(inputs) * mask).sum(1) / mask.sum(1)).square().sum()


def filled_then_summed(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    hidden = model.hidden(inputs).masked_fill(inputs["attention_mask"][..., None] == 0, 0.0)
    return model.head(hidden.sum(1)).square().sum()


def pooled_over_all(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model.head(model.hidden(inputs).mean(1)).square().sum()


def highest(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model.head(model.hidden(inputs).max(1).values).square().sum()


READ_NO_PADDING = [reward_of_last, reward_everywhere_then_last, reward_picked_then_squeezed]
READ_NO_PADDING += [values_under_a_mask, masked_mean, filled_then_summed]


@pytest.mark.parametrize("step", READ_NO_PADDING)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_reward_value_and_embedding_heads_do_not_read_padding(step: Any, kind: str) -> None:
    config = causal_config() if kind == "llama" else encoder_config("bert")
    report = compare(sharpened(OnHiddenStates(config)), step, batch(), batch((5, 9), seed=2))
    assert all_packed(report), report.off


@pytest.mark.parametrize("step", [pooled_over_all, highest])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_pooling_over_padding_on_purpose_is_kept(step: Any, kind: str) -> None:
    config = causal_config() if kind == "llama" else encoder_config("bert")
    report = compare(sharpened(OnHiddenStates(config)), step, batch(), batch(seed=1), batch((3, 3), seed=2))
    assert report.packed_calls == report.padded_runs == 1 and report.calls == 3


def test_a_loss_that_scores_padding_in_a_later_batch_only() -> None:
    """What one batch does not read says nothing about the next."""
    model = build(hf.AutoModelForCausalLM, causal_config())

    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        log_probabilities = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.log_softmax(-1)
        picked = log_probabilities[:, :-1].gather(-1, inputs["labels"][:, 1:, None].clamp_min(0))[..., 0]
        return -(picked * (inputs["labels"][:, 1:] >= 0)).sum()

    scoring = batch(seed=1)
    scoring["labels"][:] = 5
    compare(model, step, batch(), scoring, batch(seed=2))


def test_accuracy_of_a_token_classifier_in_its_training_step() -> None:
    seen: list[float] = []

    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        out = model(**inputs)
        counted = inputs["labels"] >= 0
        right = (out.logits.argmax(-1) == inputs["labels"])[counted]
        seen.append(float(right.double().mean()))
        return out.loss

    model = build(hf.AutoModelForTokenClassification, encoder_config("bert"))
    inputs = batch()
    inputs["labels"] = torch.where(inputs["labels"] < 0, -100, inputs["labels"] % 3)
    report = compare(model, step, inputs)
    assert all_packed(report), report.off
    assert seen[0] == seen[1]


def test_predictions_everywhere_are_the_padded_ones() -> None:
    plain = build(hf.AutoModelForTokenClassification, encoder_config("bert")).eval()
    model = copy.deepcopy(plain)
    accelerate(model)
    inputs = {k: v for k, v in batch().items() if k != "labels"}
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits.argmax(-1) * 1, plain(**inputs).logits.argmax(-1))


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_low_precision(kind: str) -> None:
    """Packed and padded differ by no more than the precision does."""
    plain = build(hf.AutoModelForTokenClassification, encoder_config(kind)).float()
    inputs = batch()
    inputs["labels"] = torch.where(inputs["labels"] < 0, -100, inputs["labels"] % 3)
    exact = plain(**inputs).loss
    model = copy.deepcopy(plain)
    handle = accelerate(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(**inputs), model(**inputs)
    assert found.loss.dtype == expected.loss.dtype and found.logits.dtype == expected.logits.dtype
    error = float((expected.loss - exact).abs())
    assert float((found.loss - exact).abs()) <= 3 * error + 1e-3
    assert all_packed(handle.report.padding)
