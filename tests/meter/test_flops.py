"""Operations counted from the model and its documents, against those that PyTorch sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import VOCAB, Plain, causal_lm, fit, loader
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lightning_liger import LigerCallback
from lightning_liger.calls import BackboneCall
from lightning_liger.meter.flops import Attention, Call, ModelCost, Product, Reach, head_flops
from lightning_liger.meter.operations import Operations
from lightning_liger.meter.structure import read_structure
from lightning_liger.padding.sweep import small_models

LENGTHS = (24, 7, 15)


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=0.0)).train()


def counted(run: Any) -> tuple[int, int]:
    """What FlopCounterMode sees in ``run()``: products with weights, and those of attention, all pairs of which count."""
    with FlopCounterMode(display=False) as counter:
        run()
    seen = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    attention = sum(n for op, n in seen.items() if "bmm" in op or "attention" in op)
    return sum(seen.values()) - attention, attention


@pytest.mark.parametrize("adapted", [False, True], ids=["dense", "lora"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_one_percent_of_what_pytorch_counts(kind: str, adapted: bool) -> None:
    model = causal_lm(kind, attn_implementation="eager")
    model = lora(model) if adapted else model
    documents = [torch.randint(3, VOCAB, (1, n)) for n in LENGTHS]

    def run() -> None:  # documents one by one: what a packed batch is equal to
        for ids in documents:
            model(ids, labels=ids).loss.backward()

    linear, attention = counted(run)
    operations = Operations(model)
    (backbone,) = operations.structures
    calls = [BackboneCall(backbone, (1, n), True, (n,), (n,)) for n in LENGTHS]
    packed = [BackboneCall(backbone, (1, sum(LENGTHS)), True, LENGTHS, LENGTHS)]
    operations.begin_observing()
    run()
    operations.end_observing(calls)
    found = operations.of(packed, [])
    layers = operations.structures[backbone].cost.attentions
    pairs = sum((a.forward + a.backward) * a.reach.pairs(n) for a in layers for n in LENGTHS)
    all_pairs = sum((a.forward + a.backward) * n * n for a in layers for n in LENGTHS)
    assert found.model - pairs == pytest.approx(linear, rel=0.01)
    assert all_pairs == pytest.approx(attention, rel=0.01)
    assert found.model == pytest.approx(linear + attention * pairs / all_pairs, rel=0.01)
    assert found.forward + found.backward == found.model < found.hardware


@pytest.mark.parametrize(
    "reach", [Reach(), Reach(False), Reach(True, 5), Reach(False, 5), Reach(True, None, 6)], ids=str
)
def test_pairs_are_those_of_the_mask(reach: Reach) -> None:
    for length in (1, 4, 5, 6, 7, 12, 31):
        i = torch.arange(length)
        mask = torch.ones(length, length, dtype=torch.bool)
        if reach.causal:
            mask &= i[:, None] >= i
        if reach.window is not None:
            mask &= (i[:, None] - i).abs() < reach.window
        if reach.chunk is not None:
            mask &= i[:, None] // reach.chunk == i // reach.chunk
        assert reach.pairs(length) == int(mask.sum()), length


def test_padding_and_recomputation_are_hardware_operations_alone() -> None:
    products = (Product("a", 8, 4), Product("b", 4, 8, weight_gradient=False))
    attentions = (Attention("c", 2, 4, 4, Reach()),)
    plain = ModelCost(products, attentions)
    tight, padded = Call((3, 5)), Call((3, 5), (6, 6))
    assert plain.flops(tight).model == plain.flops(padded).model
    assert plain.flops(padded).hardware > plain.flops(tight).hardware > plain.flops(tight).model
    again = tuple(Product(p.name, p.inputs, p.outputs, 1.0, p.weight_gradient, recomputed=1.0) for p in products)
    checkpointed = ModelCost(again, attentions).flops(tight)
    assert checkpointed.model == plain.flops(tight).model
    assert checkpointed.hardware - plain.flops(tight).hardware == 2 * 8 * (8 * 4 + 4 * 8)
    teacher = plain.flops(Call((3, 5), gradient=False))
    assert teacher.backward == 0 and teacher.model == teacher.hardware == plain.flops(tight).forward
    head = head_flops(Product("head", 8, 97), needed=3, computed=8)
    assert head.model == 3 * 3 * 2 * 8 * 97 and head.hardware == 8 * 3 * 2 * 8 * 97


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        *(("causal", t) for t in ("gpt2", "bloom", "mixtral", "deepseek_v3", "gpt_oss", "gemma3_text", "bart", "opt")),
        *(("masked", t) for t in ("bert", "modernbert", "albert")),
    ],
)
def test_architectures_of_all_kinds(kind: str, model_type: str) -> None:
    """Experts by the tokens that a router sends them, latent keys, layers that run several times or never."""
    model = next(small_models(kind, model_type))[0]().float()
    model.set_attn_implementation("eager")
    ids = torch.randint(5, 30, (1, 32))
    operations = Operations(model)
    (backbone,) = operations.structures

    def run() -> None:
        model(input_ids=ids, labels=ids, **({"use_cache": False} if kind == "causal" else {})).loss.backward()

    call = [BackboneCall(backbone, (1, 32), True, (32,), (32,))]
    operations.begin_observing()
    linear, attention = counted(run)
    operations.end_observing(call)
    assert operations.unknown == []
    layers = operations.structures[backbone].cost.attentions
    assert sum((a.forward + a.backward) * 32 * 32 for a in layers) == pytest.approx(attention, rel=0.01)
    found = operations.of(call, [])
    assert found.model - found.attention == pytest.approx(linear, rel=0.01)


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.c_attn(x).split(32, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = OwnAttention()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Plain PyTorch; its configuration is nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
        self.h = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(32, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor, **unused: Any) -> Any:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)[:, :-1]
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


def test_a_decoder_in_plain_pytorch() -> None:
    class Later(Counting):
        """The first step compares the packed run with the padded one; its products are more than the model's."""

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.before = self.before if batch_idx > 2 else dict(callback.report.meter)
            super().on_train_batch_start(batch, batch_idx)
            self.products.flops *= batch_idx > 2

        before: Any = None

    callback = LigerCallback(verbose=False)
    module = Later(Decoder())
    fit(module, loader(), callback, log_every_n_steps=1)  # totals are added up in readings
    report = callback.report.to_dict()
    assert report["padding_free"]["packed_calls"] == report["padding_free"]["calls"] == 4
    assert not any("MFU" in note for note in report["notes"])
    found = {name: report["meter"][name] - module.before[name] for name in ("model_flops", "attention_flops")}
    assert found["model_flops"] - found["attention_flops"] == pytest.approx(module.products.flops, rel=0.01)
    lengths = [int(n) for b in list(loader())[2:] for n in b["attention_mask"].sum(1)]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    assert found["attention_flops"] == pytest.approx(2 * 3 * 4 * 32 * pairs, rel=1e-6)


def test_what_is_not_known_is_said() -> None:
    import transformers

    made = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8)
    reasons = read_structure(transformers.AutoModel.from_config(made)).unknown
    assert any("no attention layer" in r for r in reasons)
    assert Operations(torch.nn.Linear(2, 2)).unknown == ["no backbone whose tokens are known was found"]


class Products(TorchDispatchMode):
    """PyTorch's formulas without FlopCounterMode's hooks on tensors, which read padding and thereby bring it back."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


class Counting(Plain):
    """Counts the products of all training steps, backward included."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.products = Products()
        self.products.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.products.__exit__(None, None, None)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_a_training_of_an_unmodified_module(kind: str) -> None:
    """Padded batches whose padding is removed, prompts whose head rows are not computed."""
    callback = LigerCallback(verbose=False, verify="off")  # a proof runs the first batch several times
    module = Counting(causal_lm(kind))
    fit(module, loader(), callback)
    meter = callback.report.to_dict()["meter"]
    linear = meter["model_flops"] - meter["attention_flops"]
    assert linear == pytest.approx(module.products.flops, rel=0.01)


@pytest.mark.parametrize("mode", ["full", "selective", "their own", "reentrant"])
def test_what_checkpointing_computes_again(mode: str) -> None:
    from lightning_liger.parallel.recompute import Recomputed
    from lightning_liger.patching import Switch

    model = causal_lm("llama", num_hidden_layers=3)
    if mode in ("full", "selective"):
        for layer in model.model.layers:
            Recomputed(layer, Switch(True), mode, lambda text: None).bind()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
    backbone = model.base_model
    ids = torch.randint(3, VOCAB, (1, 32))

    def run() -> None:
        with Products() as products:
            embedded = backbone.embed_tokens(ids)
            backbone(inputs_embeds=embedded, use_cache=False).last_hidden_state.sum().backward()
        counts.append(products.flops)

    counts: list[int] = []
    operations = Operations(backbone)
    operations.begin_observing()
    run()
    operations.end_observing([BackboneCall(backbone, (1, 32), True, (32,), (32,))])
    run()
    products = operations.structures[backbone].cost.products
    assert 32 * sum(p.forward * (1 + p.recomputed) + p.backward for p in products) == pytest.approx(counts[1])
    assert counts[1] > 32 * sum(p.forward + p.backward for p in products), "something is computed again"


def test_a_graph_that_calls_no_modules_counts_as_it_is_written() -> None:
    model = causal_lm("llama").base_model
    for layer in model.layers:
        layer.forward = lambda x, **kwargs: x * 1.0  # as a recorded graph would replace it
    call = [BackboneCall(model, (1, 8), True, (8,), (8,))]
    operations = Operations(model)
    before = operations.of(call, [])
    operations.begin_observing()
    model(torch.randint(3, VOCAB, (1, 8)), use_cache=False)
    operations.end_observing(call)
    assert operations.of(call, []) == before and before.model > 0 and not operations.unknown


def test_compiled_blocks_are_not_watched() -> None:
    model = causal_lm("llama").base_model
    for layer in model.layers:
        layer.compile()
    operations = Operations(model)
    operations.begin_observing()
    assert not any(m._forward_pre_hooks for layer in model.layers for m in layer.modules())
    operations.stop_observing()
