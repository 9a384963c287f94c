"""Heads of many kinds: with bias, scale and soft-cap, with adapters, and of models that nobody has heard of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from helpers import (
    PAD,
    VOCAB,
    Plain,
    assert_engaged,
    assert_same,
    both,
    causal_lm,
    collate,
    collate_shifted,
    documents,
    loader,
)
from torch import Tensor

from lightning_liger import Settings, accelerate
from lightning_liger.head.finding import find_heads

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def of_config(config: Any) -> Callable[[], Plain]:
    def make() -> Plain:
        torch.manual_seed(0)
        return Plain(transformers.AutoModelForCausalLM.from_config(config).train(), lr=0.05)

    return make


FAMILIES = {
    "cohere, logit scale": transformers.CohereConfig(**SIZES, logit_scale=0.3),
    "granite, logits divided": transformers.GraniteConfig(**SIZES, logits_scaling=4.0),
    "gemma2, soft-cap": transformers.Gemma2Config(
        **SIZES, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=5.0
    ),
    "phi, bias": transformers.PhiConfig(**SIZES, partial_rotary_factor=0.5, resid_pdrop=0.0, embd_pdrop=0.0),
}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_families_with_a_tail_of_their_own(name: str) -> None:
    plain, ours = both(of_config(FAMILIES[name]), loader)
    assert_same(plain, ours)
    assert_engaged(ours)
    assert ours.report["fused_head"]["materialised_by"] == {}


# -- adapters --------------------------------------------------------------------------------------------------------


def adapted(**options: Any) -> Callable[[], Plain]:
    def make() -> Plain:
        torch.manual_seed(0)
        kind = "llama" if options.pop("untied", True) else "qwen2"
        model = peft.get_peft_model(causal_lm(kind), peft.LoraConfig(r=4, lora_alpha=8, **options))
        with torch.no_grad():  # an adapter that starts at zero could be forgotten without a difference
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.1)
        return Plain(model, lr=0.05)

    return make


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora on the head": {"target_modules": ["lm_head", "q_proj"]},
    "lora beside the head": {"target_modules": ["q_proj", "v_proj"]},
    "rank-stabilised, with bias": {"target_modules": ["lm_head"], "use_rslora": True, "lora_bias": True},
    "dora": {"target_modules": ["lm_head", "q_proj"], "use_dora": True},
    "head saved whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_adapters_are_honoured(name: str) -> None:
    plain, ours = both(adapted(**ADAPTERS[name]), loader)
    assert_same(plain, ours)
    assert_engaged(ours)
    if "dora" not in name:
        assert ours.report["fused_head"]["materialised_by"] == {}
    trained = {n for n, p in ours.parameters.items() if not torch.equal(p, adapted(**ADAPTERS[name])().state_dict()[n])}
    if "head" in name and "beside" not in name:
        assert any("lm_head" in n for n in trained)


def test_merged_and_disabled_adapters() -> None:
    module = adapted(target_modules=["lm_head"])()
    batch = next(iter(loader()))
    model = module.model

    def losses() -> list[float]:
        found = [float(model(**batch).loss)]
        with model.disable_adapter():
            found.append(float(model(**batch).loss))
        model.merge_adapter()
        found.append(float(model(**batch).loss))
        model.unmerge_adapter()
        return found

    expected = losses()
    handle = accelerate(module, Settings())
    found = losses()
    handle.revert()
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(found[0] - found[1]) > 1e-3
    assert handle.report.head.fused_calls == 3


# -- models of one's own ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(F.gelu(self.up(self.norm(mixed))))


class NanoGPT(nn.Module):
    """Its own loss inside of forward; the context is as long as the inner layer is wide, as happens."""

    def __init__(self, tied: bool, vocab: int = VOCAB, width: int = 16, context: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, 4 * width) for _ in range(blocks))
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)
        return logits, loss


class NanoModule(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch["input_ids"], batch["targets"])[1]
        return loss


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [VOCAB, 64], ids=["vocabulary", "vocabulary as wide as a layer"])
def test_own_model_with_the_loss_inside(tied: bool, vocab: int) -> None:
    def make() -> NanoModule:
        torch.manual_seed(0)
        return NanoModule(NanoGPT(tied, vocab))

    def data() -> Any:
        return loader(
            lambda docs: {k: v % 64 if k == "input_ids" else v.clamp_max(63) for k, v in collate_shifted(docs).items()}
        )

    plain, ours = both(make, data)
    assert_same(plain, ours)
    assert_engaged(ours, packed=False)
    assert ours.report["fused_head"]["materialised_by"] == {}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.token_type, self.position = nn.Embedding(50, 8), nn.Embedding(20, 8), nn.Embedding(32, 8)
        self.body = nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 8))
        self.up = nn.Linear(8, 32)
        self.classify = nn.Linear(8, 20)


def test_what_is_not_a_head() -> None:
    module = Classifier()
    found, _ = find_heads(module, None)
    assert module.classify not in found and module.up not in found
    nano = NanoGPT(tied=False, vocab=64)
    assert find_heads(nano, None) == ([nano.lm_head], [])
    assert find_heads(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), None) == ([], [])


def test_named_head() -> None:
    nano = NanoGPT(tied=False)
    assert find_heads(nano, "lm_head") == ([nano.lm_head], [])
    with pytest.raises(ValueError, match="no such submodule"):
        find_heads(nano, "head")
    with pytest.raises(ValueError, match="must be an nn"):
        find_heads(nano, "wte")


def test_functional_transforms_of_a_model() -> None:
    """``torch.func`` over a whole model: the head stands aside."""
    model = causal_lm("llama").eval()
    batch = next(iter(loader()))
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(p: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(model, p, kwargs={**batch, "use_cache": False}).loss
        return found

    expected = torch.func.grad(loss)(parameters)
    handle = accelerate(model, Settings(padding_free=False))
    found = torch.func.grad(loss)(parameters)
    handle.revert()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_weight_in_pieces_is_left_alone_and_said(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = causal_lm("llama")
    handle = accelerate(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model.lm_head.weight = torch.nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Replicate()]))
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            model(**collate(documents(4)))
    finally:
        dist.destroy_process_group()
    assert handle.report.head.off == ["the head's weight is a DTensor where its forward runs (tensor parallel?)"]
