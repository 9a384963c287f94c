"""Where the layout of a call is read from, and what is made of each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from comparing import PAD, VOCAB, all_packed, batch, compare, gradients, sharpened, with_labels
from torch import Tensor

from lightning_liger.accelerate import accelerate
from lightning_liger.mirrored import cpu_values
from lightning_liger.padding.layout import Layout, LayoutBook, NotPackable


def causal(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3}
    if kind == "gpt2":
        own = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        own |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return sharpened(hf.GPT2LMHeadModel(hf.GPT2Config(**{**sizes, **own, **changes})))
    own = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return sharpened(hf.LlamaForCausalLM(hf.LlamaConfig(**{**sizes, **own, **changes})))


def documents(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB, (n,), generator=generator) for n in (5, 9, 3, 7)]


def packed_rows() -> tuple[dict[str, Tensor], Tensor]:
    """Two rows of two documents each, and the number of each token's document."""
    a, b, c, d = documents()
    ids = torch.full((2, 15), PAD)
    number = torch.zeros_like(ids)
    positions = torch.zeros_like(ids)
    for row, pair in enumerate(((a, b), (c, d))):
        at = 0
        for n, document in enumerate(pair):
            part = slice(at, at + len(document))
            ids[row, part], number[row, part], positions[row, part] = document, n + 1, torch.arange(len(document))
            at += len(document)
    labels = torch.where(number > 0, ids, -100)
    labels[positions == 0] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}, number


def one_by_one(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the documents, each alone."""

    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        count = 0
        for document in documents():
            total = total + model(document[None], labels=document[None]).loss * (len(document) - 1)
            count += len(document) - 1
        return total / count

    return gradients(model, step, {})


def assert_apart(model: Any, inputs: dict[str, Tensor]) -> list[str]:
    """The accelerated step equals training on each document alone."""
    expected, expected_gradients = one_by_one(copy.deepcopy(model))
    handle = accelerate(model)
    loss, found = gradients(model, with_labels, inputs)
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=0)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-5, atol=1e-6)
    assert handle.report.padding.packed_calls == 1
    return handle.report.padding.off


# -- several documents in a row ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_document_numbers_with_restarting_positions_keep_documents_apart(kind: str) -> None:
    inputs, number = packed_rows()
    said = assert_apart(causal(kind), {**inputs, "attention_mask": number})
    assert len(said) == 1 and "do not see each other" in said[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_restarting_positions_without_a_mask_keep_documents_apart(kind: str) -> None:
    inputs, _ = packed_rows()
    assert_apart(causal(kind), inputs)


def test_restarting_positions_in_one_row() -> None:
    inputs, number = packed_rows()
    real = number.bool()
    flat = {name: value[real][None] for name, value in inputs.items()}
    assert_apart(causal("gpt2"), flat)


def test_cu_seq_lens_keep_documents_apart() -> None:
    inputs, number = packed_rows()
    flat = {name: value[number.bool()][None] for name, value in inputs.items()}
    ends = torch.tensor([0, 5, 14, 17, 24], dtype=torch.int32)
    flat |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
    assert_apart(causal("gpt2"), flat)


def test_document_numbers_alone_mean_what_they_mean_to_transformers() -> None:
    inputs, number = packed_rows()
    inputs.pop("position_ids")
    report = compare(causal(), with_labels, {**inputs, "attention_mask": number})
    assert report.packed_calls == 1 and report.padded_runs == 0
    assert "see each other, as in the plain run" in report.off[0]


def test_a_mask_of_ones_joins_what_restarting_positions_separate() -> None:
    inputs, number = packed_rows()
    report = compare(causal(), with_labels, {**inputs, "attention_mask": number.clamp(max=1)})
    assert report.packed_calls == 1 and report.padded_runs == 0


def test_positions_that_jump_without_restarting_are_left_alone() -> None:
    inputs = batch((9, 9))
    positions = torch.arange(9).repeat(2, 1)
    positions[:, 5:] += 20
    inputs["position_ids"] = positions
    inputs.pop("attention_mask")
    report = compare(causal(), with_labels, inputs)
    assert report.packed_calls == 0 and "jump" in report.off[0]


# -- one mask, many dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_masks_of_any_dtype(dtype: torch.dtype) -> None:
    inputs = batch()
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    assert all_packed(compare(causal(), with_labels, inputs))


@pytest.mark.parametrize(
    "values", [(0.0, 0.5), (-1.0, 1.0), (float("-inf"), 0.0), (torch.finfo(torch.float32).min, 0.0)]
)
def test_other_masks_are_left_to_the_model(values: tuple[float, float]) -> None:
    inputs = batch()
    masked, attended = (torch.tensor(v) for v in values)
    inputs["attention_mask"] = torch.where(inputs["attention_mask"].bool(), attended, masked)
    report = compare(causal(), with_labels, inputs)
    assert report.packed_calls == 0 and "mask" in report.off[0]


# -- no mask at all ----------------------------------------------------------------------------------------------------


def unmasked(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model(inputs["input_ids"], labels=inputs["labels"]).loss


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_behind_documents_is_found_without_a_mask(kind: str) -> None:
    report = compare(causal(kind), unmasked, batch(), batch((11, 2), seed=1))
    assert all_packed(report) and report.padding > 0


def test_the_first_of_a_tail_stays_because_it_may_end_the_document() -> None:
    """The padding token also ends documents, and its label counts once."""
    inputs = batch()
    ends = inputs["attention_mask"].sum(1)
    for row in range(2):
        if ends[row] < inputs["labels"].shape[1]:
            inputs["labels"][row, ends[row]] = PAD
    model = causal(eos_token_id=PAD)
    assert all_packed(compare(model, unmasked, inputs))


def test_without_a_mask_padding_that_is_scored_is_scored() -> None:
    inputs = batch()
    inputs["labels"] = inputs["input_ids"].clone()
    report = compare(causal(), unmasked, inputs, batch(seed=1))
    assert report.packed_calls == report.padded_runs == 1


def test_without_a_mask_padding_on_the_left_is_attended_to() -> None:
    report = compare(causal(), unmasked, batch(left=True))
    assert report.packed_calls == 0


def test_an_encoder_without_a_mask_looks_at_padding() -> None:
    torch.manual_seed(0)
    own = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.BertConfig(vocab_size=VOCAB, pad_token_id=PAD, hidden_dropout_prob=0.0, **own)
    config.attention_probs_dropout_prob = 0.0
    report = compare(sharpened(hf.BertForMaskedLM(config)), unmasked, batch())
    assert report.packed_calls == 0 and "looks ahead" in report.off[0]


# -- the layout itself -------------------------------------------------------------------------------------------------


def test_layouts_of_documents() -> None:
    layout = Layout.from_documents(torch.tensor([[1, 1, 2, 0], [0, 5, 5, 5]]))
    assert layout.lengths == (2, 1, 3) and layout.tokens == 6 and layout.documents_share_rows and layout.has_padding
    assert layout.gather.tolist() == [0, 1, 2, 5, 6, 7]
    assert layout.index.tolist() == [[0, 1, 2, -1], [-1, 3, 4, 5]]
    assert layout.restart.tolist() == [0, 1, 2, 0, 1, 2]
    placed = layout.on(torch.device("cpu"))
    assert placed.cu_seqlens.tolist() == [0, 2, 3, 6] and placed.cu_seqlens.dtype == torch.int32
    with pytest.raises(NotPackable, match="gaps"):
        Layout.from_documents(torch.tensor([[1, 0, 1]]))
    with pytest.raises(ValueError, match="row 1"):
        Layout.from_mask(torch.tensor([[1, 0], [0, 0]]))


def test_the_book_reads_each_batch_once_and_forgets_it() -> None:
    book = LayoutBook()
    before = {"m": torch.tensor([[1, 1, 0]])}
    moved = {"m": before["m"].clone()}
    book.pair(before, moved)
    assert book.layout(moved["m"]) is book.layout(moved["m"])
    moved["m"][0, 1] = 0  # written to since: not what was read
    assert book.layout(moved["m"]).tokens == 1
    assert before["m"].tolist() == [[1, 1, 0]]
    book.pair({}, {})
    assert type(moved["m"]) is torch.Tensor and cpu_values(moved["m"]) is moved["m"] and book.device_reads == 0
