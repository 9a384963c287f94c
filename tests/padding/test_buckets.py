"""Batches lengthened with filler: the same losses and gradients in a handful of shapes."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import transformers as hf
from comparing import all_packed, batch, compare, sharpened, with_labels
from helpers import Plain, assert_engaged, assert_same, causal_lm, fit, loader
from test_calls import SIZES, causal
from torch import Tensor

from lightning_liger import LigerCallback
from lightning_liger.accelerate import accelerate
from lightning_liger.padding.buckets import ShapeBuckets
from lightning_liger.padding.layout import Layout
from lightning_liger.settings import Settings

FORTY = Settings(shape_buckets=[40, 64])


def layout(lengths: list[int]) -> Layout:
    return Layout.from_mask(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


def draws(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    return [tuple(generator.randint(1, 12) for _ in range(generator.randint(1, 5))) for _ in range(count)]


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [True, (100, 1000), "budget"])
def test_every_shape_holds_its_batch_and_no_document_is_empty(choice: Any) -> None:
    buckets = ShapeBuckets(True if choice == "budget" else choice)
    buckets.budget = 2048 if choice == "budget" else None
    generator = random.Random(0)
    for _ in range(300):
        lengths = [max(1, int(generator.lognormvariate(4.0, 1.5))) for _ in range(generator.randint(1, 60))]
        before = layout(lengths)
        made = buckets.lengthened(before)
        smallest = buckets.shape_of(before)
        assert made.shape_key == (made.size, len(made.documents), made.longest)
        assert made.size == smallest[0] and all(a >= b for a, b in zip(made.shape_key, smallest, strict=True))
        assert made.tokens == sum(lengths) and made.lengths == before.lengths and min(made.documents) > 0
        assert made.size == sum(made.documents) == len(made.gather) == len(made.restart) > made.tokens
        assert max(made.documents) <= made.longest
        assert torch.equal(made.index, before.index) and int(made.index.max()) < made.tokens
        placed = made.on(torch.device("cpu"))
        assert placed.cu_seqlens.dtype == torch.int32 and len(placed.cu_seqlens) == len(made.documents) + 1
        assert buckets.lengthened(before) is made


def test_full_batches_of_a_budget_have_one_size_and_hardly_any_filler() -> None:
    buckets = ShapeBuckets(True)
    buckets.budget = 16384
    generator = random.Random(0)
    shapes = set()
    for _ in range(200):
        lengths: list[int] = []
        while sum(lengths) < 15900:
            lengths.append(generator.randint(50, 400))
        shapes.add(buckets.shape_of(layout([*lengths, 16384 - sum(lengths)])))  # to the brim
    assert shapes == {(16512, 128, 512)}
    assert buckets.shape_of(layout([400] * 5)) == (2048, 8, 512)


@pytest.mark.parametrize("wrong", ["always", [], [0], [1.5], 3, None])
def test_what_is_no_choice_of_shapes_is_an_error(wrong: Any) -> None:
    with pytest.raises(ValueError, match="shape_buckets="):
        LigerCallback(shape_buckets=wrong)
    with pytest.raises(ValueError, match="padding_free=False"):
        LigerCallback(shape_buckets=True, padding_free=False)


# -- the same as before ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gemma2", "llama"])
@pytest.mark.parametrize("left", [False, True])
def test_losses_and_gradients_stay(kind: str, left: bool) -> None:
    batches = [batch(left=left), batch((3, 11, 9), left=left, seed=1), batch((9, 9, 9)), batch((20,), seed=2)]
    report = compare(causal(kind), with_labels, *batches, settings=FORTY)
    assert all_packed(report), report.off
    assert list(report.shapes) == [(40, 8, 512)]
    total = 4 * 40
    assert report.filler == total - sum((23, 23, 27, 20))
    assert report.filler_fraction == report.filler / total
    assert report.tokens == sum((23, 23, 27, 20))


def bidirectional() -> Any:
    torch.manual_seed(0)
    config = hf.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2)
    return sharpened(hf.BertForSequenceClassification(config))


def test_an_encoder_with_a_pooler() -> None:
    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        out = model(inputs["input_ids"], attention_mask=inputs["attention_mask"], output_hidden_states=True)
        return out.logits.square().sum() + out.hidden_states[1][inputs["attention_mask"].bool()].square().mean()

    report = compare(bidirectional(), step, batch(), batch((5, 5)), settings=FORTY)
    assert report.packed_calls == 2 and len(report.shapes) == 1, report.off


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_in_backward(reentrant: bool) -> None:
    model = causal("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert all_packed(compare(model, with_labels, batch(), batch((4, 10), seed=1), settings=FORTY))


def test_no_mask_and_positions_of_documents_in_one_row() -> None:
    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        return model(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss

    def packed(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        positions = torch.cat([torch.arange(9), torch.arange(11)])[None]
        return model(input_ids=inputs["input_ids"], position_ids=positions, use_cache=False).logits.square().mean()

    assert all_packed(compare(causal(), step, batch((9, 9)), batch((9,)), batch((4, 9)), settings=FORTY))
    assert all_packed(compare(causal(), packed, batch((20,)), settings=FORTY))


def test_embeddings_that_need_gradients() -> None:
    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        embeds = model.get_input_embeddings()(inputs["input_ids"]) * 1.5
        return model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], labels=inputs["labels"]).loss

    assert all_packed(compare(causal(), step, batch(), settings=FORTY))


def test_the_head_computes_no_row_of_filler() -> None:
    rows = []
    for choice in (False, [40]):
        model = causal()
        handle = accelerate(model, Settings(shape_buckets=choice))
        model(**batch()).loss.backward()
        rows.append(handle.report.head.computed_rows)
    assert rows[0] == rows[1] == int((batch()["labels"] != -100).sum())


def test_the_whole_of_the_logits() -> None:
    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return logits[inputs["attention_mask"].bool()].square().mean()

    report = compare(causal(), step, batch(), settings=FORTY)
    assert report.shapes == {(40, 8, 512): 1}


# -- where filler would be noticed -------------------------------------------------------------------------------------


def test_routers_see_no_filler() -> None:
    report = compare(causal("mixtral"), with_labels, batch(), settings=FORTY)
    assert all_packed(report) and not report.shapes
    assert any("shape_buckets" in line and "counts the tokens that it routes" in line for line in report.off)


def test_the_users_hooks_see_no_filler() -> None:
    model = causal()
    seen = []
    handle = accelerate(model, FORTY)
    model.model.layers[0].mlp.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    model(**batch()).loss.backward()
    assert [tuple(s) for s in seen] == [(1, 23, 32)]
    assert any("a forward hook on layers.0.mlp" in line for line in handle.report.padding.off)


# -- compiled layers ---------------------------------------------------------------------------------------------------


def test_compiled_layers_see_a_handful_of_shapes() -> None:
    sizes: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            sizes.extend(a.shape[1] for a in args if isinstance(a, Tensor) and a.dim() == 3 and a.shape[-1] == 32)
            return graph(*args)

        return run

    torch._dynamo.reset()
    model = causal("llama")
    for layer in model.model.layers:
        layer.compile(backend=backend)
    handle = accelerate(model)  # "auto": on, because layers are compiled
    for n, lengths in enumerate(draws(12)):
        model(**batch(lengths, seed=n)).loss.backward()
    report = handle.report.padding
    assert report.packed_calls == report.calls == 12, report.off
    assert set(sizes) == {256} and {s for s, _, _ in report.shapes} == {256}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_are_compiled_once_for_all_batches(backend: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = causal("llama")
    plain = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.compile(backend=backend, dynamic=False)
    handle = accelerate(model, Settings(shape_buckets=[40, 64]))
    lengths = [(7, 12, 4), (6, 9), (8, 3, 10, 2), (12, 12, 12, 11), (12,), (20, 20), (4, 5)]
    compiled = []
    for n, given in enumerate(lengths * 2):
        loss, expected = (m(**batch(given, seed=n)).loss for m in (model, plain))
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        loss.backward()
        compiled.append(counters["stats"]["unique_graphs"])
    report = handle.report.padding
    assert report.packed_calls == 14 and sorted(report.shapes) == [(40, 8, 512), (64, 8, 512)]
    assert compiled[-1] == len(report.shapes) * compiled[0]
    assert compiled[len(lengths) - 1] == compiled[-1]


def test_batches_of_a_training_are_known_by_their_budget() -> None:
    callback = LigerCallback(verbose=False, shape_buckets=True, max_tokens_per_batch=200)
    shaped = fit(Plain(causal_lm()), loader(count=64), callback, max_steps=4)
    assert shaped.report["padding_free"]["shapes"] == 1 and shaped.report["token_batches"]["fill"] > 0.9
    assert [size for size, _, _ in callback.report.padding.shapes] == [384]  # 200 and a tile, in tiles


# -- in a training -----------------------------------------------------------------------------------------------------


def test_a_training_with_and_without() -> None:
    callback = LigerCallback(verbose=False, shape_buckets=[48, 96])
    plain, shaped = fit(Plain(causal_lm()), loader()), fit(Plain(causal_lm()), loader(), callback)
    assert_same(plain, shaped)
    assert_engaged(shaped)
    padding = shaped.report["padding_free"]
    assert padding["shapes"] >= 1 and 0 < padding["filler_fraction"] < 0.5
    assert "filler" in callback.report.render()


def test_the_end_says_how_many_shapes_there_were(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Plain(causal_lm()), loader(), LigerCallback(shape_buckets=[48, 96]))
    assert "lightning-liger: batches had 1 shape, and " in capsys.readouterr().out.splitlines()[-1]
