"""A dozen kinds of architecture through the sweep, and what the probe leaves behind: nothing."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from lightning_liger.padding.backbones import find_backbones
from lightning_liger.padding.probe import _VERDICTS, packing_verdict
from lightning_liger.padding.sweep import main, model_types, sweep
from lightning_liger.padding.sweep_page import Row, render

PACKED = [
    ("causal", "llama"),
    ("causal", "mistral"),  # sliding window
    ("causal", "gemma2"),  # soft-cap
    ("causal", "mixtral"),  # experts
    ("causal", "gpt2"),  # learned positions
    ("causal", "gpt_oss"),  # attention sinks
    ("causal", "qwen3"),  # normalised queries and keys
    ("causal", "gemma4_text"),  # head sizes that differ between layers
    ("causal", "deepseek_v3"),  # latent attention
    ("causal", "electra"),  # an encoder made causal, with a head of several layers
    ("masked", "bert"),
    ("masked", "roberta"),  # positions that begin behind the padding token
    ("masked", "modernbert"),  # a window that looks both ways
]
PADDED = [
    ("causal", "bloom"),  # ALiBi
    ("causal", "mamba"),  # state space
    ("causal", "jamba"),  # hybrid
    ("causal", "recurrent_gemma"),  # recurrent
    ("causal", "llama4_text"),  # chunks
    ("causal", "mbart"),  # a decoder whose positions begin behind an offset
    ("masked", "bart"),  # encoder and decoder
    ("masked", "deberta"),  # relative bias
]


def test_kinds_of_architectures() -> None:
    rows = sweep(PACKED + PADDED, jobs=2, seconds=100)
    found = {(r.kind, r.model_type): (r.result, r.reason) for r in rows}
    assert {k: found[k][0] for k in PACKED} == dict.fromkeys(PACKED, "packed"), found
    assert {k: found[k][0] for k in PADDED} == dict.fromkeys(PADDED, "padded"), found
    assert all(found[k][1] for k in PADDED)


def test_the_page_says_what_was_found(tmp_path: Path) -> None:
    rows = [
        Row("causal", "llama", "LlamaForCausalLM", "packed", "", 1e-9),
        Row("causal", "mpt", "MptForCausalLM", "padded", "a|b", 0.0),
        Row("masked", "esm", "", "unbuildable", "TypeError: no"),
        Row("masked", "odd", "Odd", "DIFFERENT", "differs by 1.0e+00"),
    ]
    page = render(rows, 1e-4)
    assert "| causal | 1 | 1 | 0 | 0 |" in page and "| masked | 0 | 0 | 1 | 1 |" in page
    assert "a\\|b" in page and f"transformers {hf.__version__}" in page
    with pytest.raises(SystemExit):
        main(["no-such-type"])
    assert main(["causal:llama", "--jobs", "1", "--write", str(tmp_path / "page.md")]) == 0
    assert "| llama | LlamaForCausalLM | packed |" in (tmp_path / "page.md").read_text()


def test_a_page_of_every_type_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text()
    if f"transformers {hf.__version__}" not in page:
        pytest.skip("the page is about another version of transformers")
    for line in page.splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if cells[0] in ("causal", "masked") and cells[1].isdigit():
            packed, padded, unbuildable, different = map(int, cells[1:])
            assert packed + padded + unbuildable == len(model_types(cells[0])) and different == 0


# -- the probe ---------------------------------------------------------------------------------------------------------


def seven_billion() -> Any:
    """The shape of Llama-2-7B, without its weights."""
    config = hf.LlamaConfig(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, intermediate_size=11008)
    with torch.device("meta"):
        return hf.LlamaModel(config)


@pytest.fixture
def fresh_verdicts() -> Any:
    known = copy.copy(_VERDICTS)
    _VERDICTS.clear()
    yield
    _VERDICTS.update(known)


@pytest.mark.usefixtures("fresh_verdicts")
def test_a_seven_billion_model_is_judged_in_a_moment() -> None:
    backbone = seven_billion()
    started = time.process_time()  # seconds of work: other tests may run beside this one
    verdict = packing_verdict(backbone)
    assert time.process_time() - started < 2
    assert verdict.positions == "columns" and verdict.causal
    assert verdict.cache is not None and issubclass(verdict.cache[1], hf.DynamicCache)


@pytest.mark.parametrize(
    ("hidden", "heads", "groups"),
    [(64, 1, 1), (96, 3, 3), (96, 3, 1), (64, 2, 1), (576, 9, 3), (60, 6, 3), (48, 6, 2), (128, 8, 2)],
)
def test_any_number_of_heads_can_be_judged(hidden: int, heads: int, groups: int) -> None:
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": groups}
    with torch.device("meta"):
        backbone = hf.Qwen2Model(hf.Qwen2Config(num_hidden_layers=1, intermediate_size=64, vocab_size=300, **sizes))
    assert packing_verdict(backbone).positions == "columns"


@pytest.mark.usefixtures("fresh_verdicts")
def test_the_probe_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    backbone = hf.Qwen2Model(hf.Qwen2Config(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=300))
    attention = backbone.config._attn_implementation
    torch.manual_seed(11)
    before = torch.get_rng_state()
    level = logging.getLogger("transformers").level
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings():
        warnings.simplefilter("error")
        packing_verdict(backbone)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device() == torch.device("cpu")
    assert not caplog.records and logging.getLogger("transformers").level == level
    assert backbone.config._attn_implementation == attention and backbone.config.vocab_size == 300
    assert "forward" not in vars(backbone)


def no_init(*args: Any, **kwargs: Any) -> None:
    """What some loaders put in the place of ``torch.nn.init.normal_`` and its like."""


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.parametrize("where", ["meta", "bf16 default", "autocast", "inference", "no init", "empty weights"])
def test_the_probe_answers_wherever_it_is_asked(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = seven_billion()
    if where == "meta":
        with torch.device("meta"):
            verdict = packing_verdict(backbone)
            assert torch.empty(1).device.type == "meta"
    elif where == "bf16 default":
        torch.set_default_dtype(torch.bfloat16)
        try:
            verdict = packing_verdict(backbone)
            assert torch.get_default_dtype() == torch.bfloat16
        finally:
            torch.set_default_dtype(torch.float32)
    elif where == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            verdict = packing_verdict(backbone)
    elif where == "inference":
        with torch.inference_mode():
            verdict = packing_verdict(backbone)
    elif where == "no init":
        for name in ("normal_", "kaiming_uniform_", "uniform_", "zeros_", "ones_"):
            monkeypatch.setattr(torch.nn.init, name, no_init)
        verdict = packing_verdict(backbone)
    else:
        accelerate = pytest.importorskip("accelerate")
        with accelerate.init_empty_weights():
            verdict = packing_verdict(backbone)
            assert torch.nn.Linear(2, 2).weight.is_meta
    assert verdict.positions == "columns", verdict.reason


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (hf.Phi3Config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48,
                                        "long_factor": [2.0] * 48, "original_max_position_embeddings": 4096}), "columns"),
        (hf.LlamaConfig(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}), "columns"),
        (hf.Gemma3TextConfig(num_hidden_layers=26), "columns"),
        (hf.DeepseekV3Config(num_hidden_layers=61), "columns"),
        (hf.Qwen2Config(use_sliding_window=True, max_window_layers=14, num_hidden_layers=28, sliding_window=4096), "columns"),
        (hf.BloomConfig(), None),
    ],
)  # fmt: skip
def test_real_configurations_are_judged(config: Any, expected: str | None) -> None:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    suited, refused = find_backbones(model)
    assert bool(refused) == (expected is None)
    for backbone in suited:
        verdict = packing_verdict(backbone)
        assert verdict.positions == expected, verdict.reason
