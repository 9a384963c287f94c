"""Calls of every kind: packed and equal, or left alone and equal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from comparing import PAD, VOCAB, all_packed, batch, compare, sharpened, with_labels
from torch import Tensor

from lightning_liger.accelerate import accelerate

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def causal(kind: str = "qwen2", seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    if kind == "gpt2":
        own = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": PAD}
        own |= {"bos_token_id": 2, "eos_token_id": 3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return sharpened(hf.GPT2LMHeadModel(hf.GPT2Config(**{**own, **changes})))
    own = dict(SIZES)
    if kind == "gemma2":
        own |= {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    if kind == "mixtral":
        own |= {"num_local_experts": 4, "experts_implementation": "eager"}
    config = {"qwen2": hf.Qwen2Config, "gemma2": hf.Gemma2Config, "llama": hf.LlamaConfig, "mixtral": hf.MixtralConfig}
    attention = changes.pop("attn_implementation", None)
    made = config[kind](**{**own, **changes})
    model = sharpened(hf.AutoModelForCausalLM.from_config(made, attn_implementation=attention))
    # eager attention casts a double's lowest number to single: infinite, and NaN where padding sees nothing else
    return model.float() if kind == "gemma2" else model


def long_batch(left: bool = False) -> dict[str, Tensor]:
    return batch((150, 3, 40), left=left)


# -- what the batch looks like -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gemma2", "llama"])
@pytest.mark.parametrize("left", [False, True])
def test_padding_on_either_side(kind: str, left: bool) -> None:
    assert all_packed(compare(causal(kind), with_labels, batch(left=left), batch((3, 11), left=left, seed=1)))


def test_rows_of_equal_length_and_padding_behind_all_of_them() -> None:
    report = compare(causal(), with_labels, batch((9, 9)), batch((9, 9), to=14))
    assert (report.calls, report.packed_calls) == (2, 1) and report.off == []


def test_a_batch_of_one() -> None:
    report = compare(causal(), with_labels, batch((9,)), batch((9,), to=14))
    assert (report.calls, report.packed_calls) == (2, 1)


def test_very_long_rows() -> None:
    assert all_packed(compare(causal("llama"), with_labels, long_batch(), long_batch(left=True)))


def test_a_mask_with_holes_is_left_alone() -> None:
    inputs = batch()
    inputs["attention_mask"][1, 4] = 0
    report = compare(causal(), with_labels, inputs)
    assert report.packed_calls == 0 and "gaps" in report.off[0]


def test_labels_that_score_padding_are_scored() -> None:
    inputs = batch()
    inputs["labels"] = inputs["input_ids"].clone()
    report = compare(causal(), with_labels, inputs, batch(seed=2))
    assert report.packed_calls == report.padded_runs == 1 and "the loss reads padded positions" in report.off[0]


def test_a_mask_of_ones_over_padding_is_left_alone_and_said_once() -> None:
    inputs = batch()
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    report = compare(causal(), with_labels, inputs, inputs)
    assert report.packed_calls == 0
    assert report.off == ["the attention mask is all ones over what looks like padding, so it is attended to"]


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_scaling_by_length(rope_type: str) -> None:
    """Frequencies change where the batch, padding included, grows beyond the original length."""
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 10
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = causal("llama", rope_parameters=rope, max_position_embeddings=10)
    padded_further, as_long_as_its_rows = batch((4, 7), to=16), batch((5, 14), seed=1)
    report = compare(model, with_labels, padded_further, as_long_as_its_rows, batch((4, 7), to=16, left=True))
    assert report.packed_calls == 2 and "padded length" in report.off[0]


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_hidden_states_of_every_layer() -> None:
    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        out = model(inputs["input_ids"], attention_mask=inputs["attention_mask"], output_hidden_states=True)
        assert len(out.hidden_states) == 3
        mask = inputs["attention_mask"].unsqueeze(-1)
        return sum((h.square() * mask).sum() for h in out.hidden_states)

    assert all_packed(compare(causal(), step, batch()))


@torch.no_grad()
def test_hidden_states_in_evaluation_are_the_padded_ones_everywhere() -> None:
    plain = causal().eval()
    model = copy.deepcopy(plain)
    handle = accelerate(model)
    inputs = {k: v for k, v in batch().items() if k != "labels"}
    expected = plain(**inputs, output_hidden_states=True)
    found = model(**inputs, output_hidden_states=True)
    assert handle.report.padding.packed_calls == 1
    for a, b in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(a + 0, b)
    torch.testing.assert_close(found.logits + 0, expected.logits)


def test_attention_weights_are_not_packed() -> None:
    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        out = model(**inputs, output_attentions=True)
        assert out.attentions[0].shape == (3, 4, 12, 12)
        return out.loss + out.attentions[0].square().sum()

    model = causal(attn_implementation="eager")
    report = compare(model, step, batch())
    assert report.packed_calls == 0 and "attention weights" in report.off[0]


def test_tuples_are_as_long_as_before() -> None:
    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        out = model(**inputs, return_dict=False)
        lengths.append((len(out), type(out)))
        return out[0]

    lengths: list[Any] = []
    assert all_packed(compare(causal(), step, batch()))
    assert lengths[0] == lengths[1]


# -- KV caches ---------------------------------------------------------------------------------------------------------


def decoded(model: Any, inputs: dict[str, Tensor], steps: int = 4) -> Tensor:
    """A loop written by hand over left-padded prompts."""
    mask = inputs["attention_mask"]
    out = model(inputs["input_ids"], attention_mask=mask)
    found = []
    for _ in range(steps):
        token = out.logits[:, -1:].argmax(-1)
        found.append(token)
        mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)
        out = model(token, attention_mask=mask, past_key_values=out.past_key_values)
    return torch.cat([*found, out.logits[:, -1].argmax(-1, keepdim=True)], 1)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gemma2"])
def test_a_decoding_loop_by_hand_finds_its_cache(kind: str) -> None:
    plain = causal(kind).eval()
    model = copy.deepcopy(plain)
    handle = accelerate(model)
    inputs = batch(left=True)
    with torch.no_grad():
        expected = decoded(plain, inputs)
        for _ in range(2):
            assert torch.equal(decoded(model, inputs), expected)
    report = handle.report.padding
    assert report.packed_calls == 1 and any("KV cache is used" in reason for reason in report.off)


def test_a_cache_nobody_touches_is_not_made() -> None:
    plain = causal().eval()
    model = copy.deepcopy(plain)
    handle = accelerate(model)
    inputs = batch()
    with torch.no_grad():
        expected, found = plain(**inputs), model(**inputs)
    assert isinstance(found.past_key_values, type(expected.past_key_values))
    assert handle.report.padding.padded_runs == 0
    assert found.past_key_values.get_seq_length() == 12
    assert type(found.past_key_values) is type(expected.past_key_values)
    assert handle.report.padding.padded_runs == 1
    for a, b in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys)


def test_a_cache_in_training_carries_gradients() -> None:
    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        cache = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).past_key_values
        return sum(layer.values.square().mean() for layer in cache.layers)

    compare(causal(), step, batch(), batch(seed=1))


def test_what_was_not_computed_before_the_weights_changed_is_not_made_up() -> None:
    for read in (lambda out: float(out.logits[:, -1].sum()), lambda out: out.past_key_values.get_seq_length()):
        model = causal()
        accelerate(model)
        out = model(**batch())
        out.loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match=r"after the weights or inputs were written to|since they were made"):
            read(out)


def test_ids_that_are_written_to_after_the_call() -> None:
    plain = causal().eval()
    model = copy.deepcopy(plain)
    accelerate(model)
    found = []
    for m in (plain, model):
        inputs = batch()
        out = m(inputs["input_ids"], attention_mask=inputs["attention_mask"])
        inputs["input_ids"].fill_(5), inputs["attention_mask"].fill_(1)
        found.append(out.logits + 0)
    torch.testing.assert_close(found[1], found[0])


def test_no_cache_when_none_is_wanted() -> None:
    plain, inputs = causal(use_cache=False), batch()
    model = copy.deepcopy(plain)
    accelerate(model)
    assert model(**inputs).past_key_values is None and plain(**inputs).past_key_values is None
    assert model(**inputs, use_cache=True).past_key_values is not None


# -- checkpointing, compilation, sharing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gpt2"])
def test_gradient_checkpointing(kind: str, reentrant: bool) -> None:
    model = causal(kind)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    report = compare(model, with_labels, batch(), batch((4, 10), seed=1))
    assert all_packed(report), report.off


@pytest.mark.parametrize("what", ["model", "in place", "backbone", "layers"])
def test_compiled_models_are_right(what: str) -> None:
    torch._dynamo.reset()
    model = causal("llama")
    if what == "in place":
        model.compile(backend="eager")
    elif what == "backbone":
        model.model.compile(backend="eager")
    elif what == "layers":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    plain = copy.deepcopy(model)
    handle = accelerate(model)
    runs = torch.compile(model, backend="eager") if what == "model" else model
    for inputs in (batch(), batch((6, 9), seed=1)):
        loss, expected = runs(**inputs).loss, plain(**inputs).loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        model.zero_grad(), plain.zero_grad()
        loss.backward(), expected.backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    report = handle.report.padding
    if what == "layers":
        assert report.packed_calls == 2, report.off
    elif what != "model":  # compiled after it was accelerated
        assert report.applied == 0 and "torch.compile" in report.off[0]


def test_compiled_layers_are_not_compiled_again_for_each_batch() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = causal("llama")
    for layer in model.model.layers:
        layer.compile(backend="eager")
    accelerate(model)
    compiled = []
    for n, lengths in enumerate([(7, 12, 4), (6, 9), (3, 4, 11), (5, 6), (8, 3, 10, 2)]):
        model(**batch(lengths, seed=n)).loss.backward()
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[1] == compiled[-1]


def test_models_that_share_one_config_do_not_disturb_each_other() -> None:
    student = causal()
    teacher = sharpened(hf.AutoModelForCausalLM.from_config(student.config)).eval()
    teacher.config = student.config
    inputs = batch()
    with torch.no_grad():
        expected = teacher(**inputs).logits.clone()
    handle = accelerate(student)
    loss = student(**inputs).loss
    with torch.no_grad():
        torch.testing.assert_close(teacher(**inputs).logits, expected)
    loss.backward()
    assert handle.report.padding.packed_calls == 1
    assert student.config._attn_implementation == teacher.config._attn_implementation == "sdpa"


# -- things that count or draw per position ----------------------------------------------------------------------------


def test_router_losses_see_what_they_saw() -> None:
    report = compare(causal("mixtral", output_router_logits=True, router_aux_loss_coef=0.1), with_labels, batch())
    assert report.packed_calls == 0 and "router logits" in report.off[0]
    assert all_packed(compare(causal("mixtral"), with_labels, batch()))


def test_dropout_runs_packed() -> None:
    model = causal("llama", attention_dropout=0.3)
    handle = accelerate(model)
    losses = torch.stack([model(**batch()).loss.detach() for _ in range(30)])
    model.eval()
    assert handle.report.padding.packed_calls == 30
    assert losses.std() > 0
    with handle.paused():
        model.train()
        plain = torch.stack([model(**batch()).loss.detach() for _ in range(30)])
    # the same distribution: means within four standard errors
    error = (losses.var() / 30 + plain.var() / 30).sqrt()
    assert (losses.mean() - plain.mean()).abs() < 4 * error


def test_given_positions_are_used() -> None:
    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        return model(**inputs, position_ids=positions).loss

    assert all_packed(compare(causal("gpt2"), step, batch(left=True)))


def test_embeddings_instead_of_ids() -> None:
    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        embeds = model.get_input_embeddings()(inputs["input_ids"]) * 1.5
        return model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], labels=inputs["labels"]).loss

    assert all_packed(compare(causal(), step, batch()))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_decoder_layers_that_drop_keywords(reentrant: bool | None) -> None:
    torch.manual_seed(0)
    model = sharpened(hf.StableLmForCausalLM(hf.StableLmConfig(**SIZES)))
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    report = compare(model, with_labels, batch(), batch((4, 10), seed=1), batch(left=True))
    assert all_packed(report), report.off
