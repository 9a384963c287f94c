"""Attention inside of documents: masks, launches, proofs and the choice between backends, without a GPU."""

from __future__ import annotations

import copy
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import all_packed, batch, compare, with_labels
from test_calls import causal
from torch import Tensor

from lightning_liger import Settings, accelerate
from lightning_liger.padding.backends import choice, flex, registry
from lightning_liger.padding.backends.documents import by_torch
from lightning_liger.padding.backends.errors import BackendError
from lightning_liger.padding.backends.features import Features
from lightning_liger.padding.backends.page import main
from lightning_liger.padding.backends.proof import LENGTHS, _inputs, per_document_reference, prove, small
from lightning_liger.padding.backends.registry import BACKENDS, Backend, by_name
from lightning_liger.padding.layout import Layout

CPU = torch.device("cpu")
PLAIN = Features("cpu", torch.float32, 16, 16, 4, 2)
KINDS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=48),
    "both ways": replace(PLAIN, causal=False),
    "both ways in a window": replace(PLAIN, causal=False, window=48),
    "soft-cap": replace(PLAIN, softcap=3.0),
    "scale": replace(PLAIN, scale=0.4),
    "sinks": replace(PLAIN, sinks=True),
    "one head for all": replace(PLAIN, heads=6, kv_heads=1),
    "wide values": replace(PLAIN, value_size=24),
}


def layout_of(*lengths: int) -> Layout:
    return Layout.from_documents(
        torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))[None]
    )


# -- FlexAttention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(5,), (128,), (129, 1, 300), (64,) * 4, (1000, 24), (700, 1, 1, 900)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 48, 200, 5000])
@pytest.mark.parametrize("is_causal", [True, False])
def test_block_masks_say_what_a_dense_mask_says(lengths: tuple[int, ...], window: int | None, is_causal: bool) -> None:
    size = flex.bucket(sum(lengths))
    layout, features = layout_of(*lengths), replace(PLAIN, causal=is_causal, window=window)
    mask = flex.block_mask(layout, size, features, CPU)
    assert flex.block_mask(layout, size, features, CPU) is mask  # once per layout, not per layer
    document = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor([*lengths, size - sum(lengths)]))
    token = torch.arange(size)
    distance = token[:, None] - token[None]
    dense = document[:, None] == document[None]
    dense &= distance >= 0 if is_causal else True
    dense &= distance.abs() < window if window is not None else True
    assert torch.equal(mask.mask_mod(None, None, token[:, None], token[None]), dense)
    n = size // flex.BLOCK
    blocks = dense.view(n, flex.BLOCK, n, flex.BLOCK).permute(0, 2, 1, 3).flatten(2)

    def listed(count: Tensor, index: Tensor) -> Tensor:
        found = torch.zeros(n, n, dtype=torch.int)
        for row in range(n):
            found[row, index[0, 0, row, : int(count[0, 0, row])].long()] += 1
        return found

    full, partial = (
        listed(mask.full_kv_num_blocks, mask.full_kv_indices),
        listed(mask.kv_num_blocks, mask.kv_indices),
    )
    assert torch.equal(full + partial, blocks.any(-1).int()) and torch.equal(full, blocks.all(-1).int())


def test_sizes_are_few_and_close() -> None:
    sizes = {flex.bucket(n) for n in range(4097, 8193)}
    assert len(sizes) == 8 and all(size % flex.BLOCK == 0 for size in sizes)
    assert all(n <= flex.bucket(n) <= max(n * 1.13, n + flex.BLOCK) for n in range(1, 40000, 7))


@torch.no_grad()
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "sinks"])  # FlexAttention has no log-sum-exp on the CPU
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_computes_each_document(kind: str) -> None:
    features = KINDS[kind]
    tensors, _, _ = _inputs(features, CPU)
    found = flex.flex(*tensors, layout_of(*LENGTHS), features, None)
    torch.testing.assert_close(
        found, per_document_reference(*tensors, layout_of(*LENGTHS), features, None), rtol=1e-4, atol=1e-5
    )


@torch.no_grad()
def test_flex_attention_is_compiled_twice_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, compile, runner = CompileCounter(), torch.compile, flex._runner
    monkeypatch.setattr(torch, "compile", lambda function: compile(function, backend=counter))
    monkeypatch.setattr(flex, "_runner", lambda device, kind: runner("cuda", kind))
    kinds = [PLAIN, replace(PLAIN, heads=6, kv_heads=3)]
    for kind in kinds:
        for lengths in ((100, 50), (110, 90), (300, 200), (600, 200), (1900, 200)):
            for features in (kind, replace(kind, window=20), replace(kind, causal=False)):
                shape = (1, kind.heads, sum(lengths), 16)
                q, k, v = (
                    torch.randn(shape),
                    torch.randn(shape)[:, : kind.kv_heads],
                    torch.randn(shape)[:, : kind.kv_heads],
                )
                flex.flex(q, k, v, layout_of(*lengths), features, None)
    assert counter.frame_count == 2 * len(kinds)
    runner.cache_clear()


# -- FlashAttention ----------------------------------------------------------------------------------------------------


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: Any, scale: float | None, causal: bool, **more: Any
) -> Tensor:
    """What every flash_attn_varlen_func computes, from its own arguments."""
    assert cu.dtype == torch.int32 and bool((cu.diff() > 0).all())
    left, right = (-1 if side is None else side for side in window)
    right = 0 if causal else right
    lengths = tuple(cu.diff().tolist())
    parts = []
    groups = q.shape[1] // k.shape[1]
    for a, b, c in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
        token = torch.arange(len(a))
        distance = token[:, None] - token[None]
        allowed = torch.ones_like(distance, dtype=torch.bool)
        allowed &= distance <= left if left >= 0 else True
        allowed &= -distance <= right if right >= 0 else True
        scores = torch.einsum("qhd,khd->hqk", a, b.repeat_interleave(groups, 1)) * (scale or a.shape[-1] ** -0.5)
        if cap := more.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~allowed, float("-inf"))
        if (sinks := more.get("sinks")) is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(a), 1)], -1)
        weights = scores.softmax(-1)[..., : len(a)]
        parts.append(torch.einsum("hqk,khd->qhd", weights, c.repeat_interleave(groups, 1)))
    return torch.cat(parts)


def fa2(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None):  # fmt: skip
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max()) and type(max_seqlen_q) is int
    return varlen(q, k, v, cu_seqlens_q, window_size, softmax_scale, causal, softcap=softcap)


def fa3(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False):  # fmt: skip
    return varlen(q, k, v, cu_seqlens_q, window_size, softmax_scale, causal, softcap=softcap), None


def fa4(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
        softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False):  # fmt: skip
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max()) and type(max_seqlen_q) is int
    assert all(side is None or side >= 0 for side in window_size)
    return varlen(
        q, k, v, cu_seqlens_q, window_size, softmax_scale, causal, softcap=softcap, sinks=learnable_sink
    ), None


def torch_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                 window_size=(-1, -1), enable_gqa=False):  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return varlen(query, key, value, cu_seq_q, window_size, scale, False)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages' signatures over plain arithmetic: what is launched here is computed, not what computes it."""
    for name, function in (("flash_attn", fa2), ("flash_attn.cute", fa4), ("flash_attn_interface", fa3)):
        module = types.ModuleType(name)
        module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", torch_varlen)
    monkeypatch.setattr(registry.flash, "_TAKES_GQA", [])
    yield


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fa4", "fa3", "fa2", "varlen"])
def test_launches_say_what_is_meant(name: str, kind: str) -> None:
    backend, features = by_name(name), KINDS[kind]
    if backend.lacks(features.asked()):
        pytest.skip(backend.lacks(features.asked()))
    assert prove(backend, features, CPU) == ""


# -- the proof ---------------------------------------------------------------------------------------------------------


def backend_of(run: Any) -> Backend:
    return Backend("mine", "a backend under test", run, head_size=256)


@pytest.mark.parametrize("kind", KINDS)
def test_right_attention_passes(kind: str) -> None:
    assert prove(backend_of(per_document_reference), KINDS[kind], CPU) == ""
    assert small(KINDS[kind]).heads // small(KINDS[kind]).kv_heads == KINDS[kind].heads // KINDS[kind].kv_heads


@pytest.mark.parametrize("kind", ["plain", "window", "both ways", "both ways in a window", "scale"])
def test_attention_per_document_passes(kind: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Any) -> Tensor:
        return by_torch(q, k, v, layout, features)

    assert prove(backend_of(run), KINDS[kind], CPU) == ""


def one_document(q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Any) -> Tensor:
    return per_document_reference(q, k, v, layout_of(q.shape[2]), features, sinks)


def ignoring(**changes: Any) -> Any:
    def run(q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Any) -> Tensor:
        return per_document_reference(q, k, v, layout, replace(features, **changes), None)

    return run


def faintly_leaking(q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Any) -> Tensor:
    return per_document_reference(q, k, v, layout, features, sinks) + 1e-6 * v.mean()


def leaking_gradients(q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Any) -> Tensor:
    leak = 1e-6 * v.mean()
    return per_document_reference(q, k, v, layout, features, sinks) + (leak - leak.detach())


def without_a_gradient(q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Any) -> Tensor:
    return per_document_reference(q, k.detach() + 0 * k, v, layout, features, sinks)


def raising(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image is available\nfor execution")


@pytest.mark.parametrize(
    ("run", "kind", "reason"),
    [
        (one_document, "plain", "its output is wrong|its gradient"),
        (ignoring(window=None), "window", "is wrong"),
        (ignoring(window=47), "window", "is wrong"),
        (ignoring(causal=True), "both ways", "is wrong"),
        (ignoring(softcap=None), "soft-cap", "is wrong"),
        (ignoring(scale=None), "scale", "is wrong"),
        (ignoring(sinks=False), "sinks", "is wrong|raised"),
        (faintly_leaking, "plain", "changing one document changes another one's output"),
        (leaking_gradients, "plain", "sends gradients into another one"),
        (without_a_gradient, "plain", "gradient of the keys is wrong"),
        (raising, "plain", "raised RuntimeError: no kernel image is available for execution"),
        (lambda q, *_: q.double(), "plain", "raised|returns"),
    ],
)  # fmt: skip
def test_wrong_attention_is_found(run: Any, kind: str, reason: str) -> None:
    import re

    found = prove(backend_of(run), KINDS[kind], CPU)
    assert re.search(reason, found), found


def test_a_proof_leaves_no_trace() -> None:
    before = torch.get_rng_state()
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert prove(backend_of(per_document_reference), PLAIN, CPU) == ""
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
    assert not saved and torch.equal(torch.get_rng_state(), before)


# -- the choice --------------------------------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)
H200 = Features("cuda", torch.bfloat16, 128, 128, 32, 8, capability=(9, 0))
SHORT, LONG = layout_of(*[64] * 8), layout_of(5000)


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An H200 with every package, as far as the choice can see; ``broken`` maps names to failed proofs."""
    broken: dict[str, str] = {}
    missing: set[str] = set()
    monkeypatch.setattr(registry, "_unavailable", lambda b: "it is not installed" if b.name in missing else "")
    monkeypatch.setattr(choice, "prove", lambda backend, features, device: broken.get(backend.name, ""))
    for cache in (choice._PROVED, choice._CHOSEN):
        monkeypatch.setattr(choice, {id(choice._PROVED): "_PROVED", id(choice._CHOSEN): "_CHOSEN"}[id(cache)], {})
    return types.SimpleNamespace(broken=broken, missing=missing)


def chosen(features: Features, layout: Layout, asked: str = "auto") -> tuple[str, list[str]]:
    dropped: list[str] = []
    return choice.choose(asked, features, layout, GPU, dropped.append).name, dropped


@pytest.mark.parametrize(
    ("features", "layout", "missing", "expected"),
    [
        (H200, SHORT, "", "fa2"),
        (H200, SHORT, "fa2", "varlen"),
        (H200, LONG, "", "fa4"),
        (H200, LONG, "fa4", "fa3"),
        (H200, LONG, "fa4 fa3 fa2", "varlen"),
        (replace(H200, softcap=50.0), SHORT, "fa2", "fa4"),
        (replace(H200, softcap=50.0), SHORT, "fa2 fa3 fa4", "flex"),
        (replace(H200, sinks=True), SHORT, "", "fa4"),
        (replace(H200, sinks=True), SHORT, "fa4", "flex"),
        (replace(H200, dropout=0.1), LONG, "", "fa2"),
        (replace(H200, head_size=192), SHORT, "fa2", "fa4"),
        (replace(H200, head_size=512, value_size=512), SHORT, "", "sdpa"),
        (replace(H200, other=("indices",)), SHORT, "", "sdpa"),
        (replace(H200, capability=(7, 5)), SHORT, "", "flex"),
        (replace(H200, capability=(8, 0)), LONG, "", "fa2"),
        (replace(H200, dtype=torch.float32), LONG, "", "sdpa"),
        (replace(H200, device="cpu", capability=(0, 0)), LONG, "", "sdpa"),
    ],
)
def test_automatic_choice(choices: Any, features: Features, layout: Layout, missing: str, expected: str) -> None:
    choices.missing.update(missing.split())
    assert chosen(features, layout)[0] == expected


def test_what_fails_its_proof_is_dropped_with_the_reason(choices: Any) -> None:
    choices.broken["fa2"] = "its output is wrong"
    assert chosen(H200, SHORT) == ("varlen", ["attention backend 'fa2' is not used: its output is wrong"])
    with pytest.raises(BackendError, match=r"attention='fa2'.*its output is wrong.*attention='auto'"):
        chosen(H200, SHORT, "fa2")


def test_attention_dropout_without_a_kernel_is_said(choices: Any) -> None:
    choices.missing.add("fa2")
    name, dropped = chosen(replace(H200, dropout=0.1), SHORT)
    assert name == "sdpa" and "once per document" in dropped[0] and "attention dropout" in dropped[0]


@pytest.mark.parametrize(
    ("name", "features", "reason"),
    [
        ("fa4", replace(H200, dropout=0.1), "no attention dropout"),
        ("varlen", replace(H200, softcap=30.0), "no soft-capped scores"),
        ("varlen", replace(H200, dtype=torch.float32), "fp16 or bf16, not in fp32"),
        ("fa3", replace(H200, capability=(8, 0)), "no kernels for compute capability 8.0"),
        ("fa2", replace(H200, head_size=100, value_size=100), "multiples of 8 up to 256, not 100"),
        ("flex", replace(H200, device="cpu"), "the tensors are on cpu"),
    ],
)
def test_a_name_is_taken_at_its_word(choices: Any, name: str, features: Features, reason: str) -> None:
    with pytest.raises(BackendError, match=f"attention='{name}'.*{reason}.*attention='auto'"):
        chosen(features, SHORT, name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("name", ["fa4", "fa3", "fa2", "varlen", "flex"])
def test_a_missing_device_is_an_error_before_training(name: str) -> None:
    with pytest.raises(ValueError, match=f"attention='{name}'.*needs a CUDA device.*attention='auto'.*'sdpa'"):
        accelerate(causal(), Settings(attention=name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_missing_device_is_an_error_for_plain_decoders() -> None:
    import decoder_models

    model = decoder_models.NanoGPT()
    with pytest.raises(ValueError, match=r"attention='varlen'.*needs a CUDA device.*attention='auto'"):
        accelerate(model, Settings(attention="varlen"))
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_missing_package_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    registry._unavailable.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    model = causal()
    with pytest.raises(ValueError, match=r"attention='fa3'.*not installed.*build it from.*attention='auto'"):
        accelerate(model, Settings(attention="fa3", kernels=False))
    registry._unavailable.cache_clear()
    assert "forward" not in vars(model.model)  # nothing was left bound


def test_version_4_alone_is_not_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    registry._unavailable.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert by_name("fa2").unavailable() == "it is not installed"
    registry._unavailable.cache_clear()


def test_what_a_model_asks_for_is_an_error_before_training(choices: Any) -> None:
    with pytest.raises(ValueError, match=r"attention='varlen'.*Gemma2Model needs more: it has no soft-capped scores"):
        accelerate(causal("gemma2"), Settings(attention="varlen"))
    with pytest.raises(ValueError, match=r"LlamaModel needs more: it has no attention dropout"):
        accelerate(causal("llama", attention_dropout=0.1), Settings(attention="fa4"))
    with pytest.raises(ValueError, match=r"LlamaModel needs more: its head sizes are multiples of 8 up to 256, not 12"):
        accelerate(causal("llama", head_dim=12), Settings(attention="fa2"))
    accelerate(causal("llama"), Settings(attention="fa4")).revert()


def test_every_name_is_an_option() -> None:
    for name in registry.NAMES:
        assert Settings(attention=name).attention == name
    assert len({b.name for b in BACKENDS}) == len(BACKENDS)


# -- in a model --------------------------------------------------------------------------------------------------------


def test_the_report_names_the_backend() -> None:
    model = causal()
    handle = accelerate(model)
    model(**batch()).loss.backward()
    assert handle.report.to_dict()["padding_free"]["attention"] == {"sdpa": 2}
    assert "attention: sdpa" in handle.report.rows()[0][2]


def test_named_sdpa_runs() -> None:
    model = causal()
    handle = accelerate(model, Settings(attention="sdpa"))
    model(**batch()).loss.backward()
    assert handle.report.padding.packed_calls == 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_a_model_loaded_with_flex_attention_stays_causal() -> None:
    plain = causal("llama", attn_implementation="flex_attention").float().eval()
    model = copy.deepcopy(plain)
    handle = accelerate(model)
    inputs = batch()
    mask = inputs["attention_mask"].bool()
    expected = plain(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    found = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    torch.testing.assert_close(found[mask] + 0, expected[mask], rtol=1e-4, atol=1e-4)
    assert handle.report.padding.packed_calls == 1


def gpt_oss() -> Any:
    import transformers as hf
    from comparing import PAD, VOCAB, sharpened

    torch.manual_seed(0)
    config = hf.GptOssConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, pad_token_id=PAD,
        bos_token_id=2, eos_token_id=3, experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = hf.GptOssForCausalLM._from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return sharpened(model).float()


def test_attention_sinks_and_their_gradients() -> None:
    report = compare(gpt_oss(), with_labels, batch(), batch(left=True))
    assert all_packed(report), report.off


def test_attention_under_autocast_is_in_its_dtype() -> None:
    """Norms of queries and keys leave autocast; ``scaled_dot_product_attention`` takes them back."""
    import transformers as hf
    from test_calls import SIZES

    torch.manual_seed(0)
    plain = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8))
    model = copy.deepcopy(plain)
    accelerate(model)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [m(**batch()).loss for m in (plain, model)]
    torch.testing.assert_close(losses[1], losses[0], rtol=5e-3, atol=0)


# -- the first batch without a mask ------------------------------------------------------------------------------------


def unmasked(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss


def test_the_first_batch_without_a_mask_is_run_both_ways() -> None:
    model = causal("llama", attention_dropout=0.2)
    runs: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    handle = accelerate(model)
    state = torch.get_rng_state()
    for expected in (3, 4):
        unmasked(model, batch())
        assert len(runs) == expected
    assert all(m.training for m in model.modules())
    torch.set_rng_state(state)
    assert handle.report.padding.packed_calls == 2 and handle.report.padding.padded_runs == 0


def test_a_module_that_looks_at_its_padding_after_all_keeps_it() -> None:
    """The tiny model knows nothing of what was hooked on to this one."""

    def look_around(module: Any, args: Any, output: Any) -> Any:
        return output - output.mean(1, keepdim=True)

    model = causal("llama")
    model.model.layers[0].register_forward_hook(look_around)
    report = compare(model, unmasked, batch(), batch(seed=1))
    assert report.packed_calls == 0 and "the first batch without a mask" in report.off[0]


def test_the_documentation_has_the_table_of_the_registry(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "attention.md"
    copied = tmp_path / "page.md"
    copied.write_text(page.read_text())
    assert main(["--write", str(copied)]) == 0
    assert copied.read_text() == page.read_text(), (
        "run: python -m lightning_liger.padding.backends.page --write docs/attention.md"
    )
    assert all(f"| `{b.name}` |" in page.read_text() for b in BACKENDS)
