"""Operations counted from the model and its documents, against those that PyTorch sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import VOCAB, Plain, causal_lm, config, fit, loader
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lightning_liger import LigerCallback
from lightning_liger.calls import BackboneCall
from lightning_liger.meter.flops import Attention, Call, ModelCost, Product, Reach, head_flops
from lightning_liger.meter.operations import Operations
from lightning_liger.meter.structure import read_structure

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


def test_experts_count_for_the_tokens_that_a_router_sends_them() -> None:
    import transformers

    sizes = config("llama").to_dict()
    sizes = {k: sizes[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    made = transformers.MixtralConfig(**sizes, **heads, attn_implementation="eager", pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(made).train().base_model
    model.set_experts_implementation("eager")  # the grouped product is not among those that PyTorch counts
    ids = torch.randint(3, VOCAB, (1, 32))
    linear, _ = counted(lambda: model(ids, use_cache=False).last_hidden_state.sum().backward())
    cost = read_structure(model).cost
    assert not cost.unknown
    assert 32 * sum(p.forward + p.backward for p in cost.products) == pytest.approx(linear, rel=0.01)


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
    callback = LigerCallback(verbose=False)
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
