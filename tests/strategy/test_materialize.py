"""Modules built on ``meta`` get the values of a build on the CPU, or of the checkpoint that they name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import transformers
from helpers import causal_lm, collate, config, documents
from torch import Tensor

from lightning_liger.parallel.initialize import Uninitialised, tensors_of
from lightning_liger.parallel.materialize import Materializer, is_meta
from lightning_liger.parallel.pretrained import Unloadable

CPU = torch.device("cpu")


def built(make: Callable[[], nn.Module], device: str, seed: int = 5) -> Any:
    torch.manual_seed(seed)
    with torch.device(device):
        return make()


def filled(make: Callable[[], nn.Module], weights: str = "auto") -> tuple[Any, list[str]]:
    notes: list[str] = []
    module = built(make, "meta")
    state = torch.get_rng_state()
    materializer = Materializer(module, weights, notes.append)
    materializer.fill(module, CPU)
    assert torch.equal(torch.get_rng_state(), state), "one rank alone would draw other numbers from here on"
    return module, notes


def values(module: nn.Module) -> dict[str, Tensor]:
    return {path: tensor.detach() for path, _, _, tensor in tensors_of(module)}


def assert_equal(module: nn.Module, reference: nn.Module) -> None:
    found, wanted = values(module), values(reference)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert not is_meta(found[name]), name
        assert found[name].dtype == wanted[name].dtype
        assert torch.equal(found[name], wanted[name]), name


def loss_of(model: Any) -> Tensor:
    loss: Tensor = model(**collate(documents(4))).loss
    return loss


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma2"])
def test_the_same_values_as_on_the_cpu(kind: str) -> None:
    def make() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(config(kind))

    module, notes = filled(make)
    reference = built(make, "cpu")
    assert_equal(module, reference)
    assert module.lm_head.weight.requires_grad
    tied = reference.lm_head.weight is reference.get_input_embeddings().weight
    assert (module.lm_head.weight is module.get_input_embeddings().weight) == tied
    assert torch.equal(loss_of(module), loss_of(reference))
    assert len(notes) == 1 and "own initialisers" in notes[0]


def test_the_same_distribution_where_constructors_draw_for_themselves() -> None:
    module, _ = filled(lambda: transformers.AutoModelForCausalLM.from_config(config("gpt2", n_embd=128)))
    reference = built(lambda: transformers.AutoModelForCausalLM.from_config(config("gpt2", n_embd=128)), "cpu")
    for name, wanted in values(reference).items():
        found = values(module)[name]
        assert float(found.float().std(correction=0)) == pytest.approx(
            float(wanted.float().std(correction=0)), rel=0.1
        ), name
        assert float(found.float().mean()) == pytest.approx(float(wanted.float().mean()), abs=5e-3), name


class NanoGPT(nn.Module):
    """What many write for themselves: tied by hand, initialised by ``apply``, a buffer and a child with its own reset."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(31, 16), nn.Linear(16, 31, bias=False)
        self.wte.weight = self.head.weight
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.scale = Scale(16)
        self.norm = nn.BatchNorm1d(16)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.02)
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.register_buffer("positions", torch.empty(4, dtype=torch.long), persistent=False)
        self.register_buffer("mask", torch.empty(4, dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.positions.copy_(torch.arange(4))
        self.mask.fill_(False)


def test_models_of_nobodys_library() -> None:
    module, _ = filled(NanoGPT)
    assert_equal(module, built(NanoGPT, "cpu"))
    assert module.wte.weight is module.head.weight


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3, 3)
        self.token = nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.arange(3))


def test_what_nothing_initialises_is_an_error_that_names_it() -> None:
    with pytest.raises(Uninitialised, match=r"2 tensors .* value: 0\.token, 0\.table \(in Forgotten\)") as raised:
        filled(lambda: nn.Sequential(Forgotten()))
    assert "reset_parameters()" in str(raised.value)


class Half(nn.Module):
    """Writes one of its two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[0].zero_()


def test_half_written_is_not_written() -> None:
    with pytest.raises(Uninitialised, match=r"0\.weight"):
        filled(lambda: nn.Sequential(Half()))


def test_what_is_real_is_left_alone() -> None:
    def make() -> nn.Module:
        new = nn.Linear(4, 4)
        with torch.device("cpu"):
            torch.manual_seed(1)
            return nn.Sequential(new, causal_lm("llama", seed=3), nn.LayerNorm(4))

    module, _ = filled(make)
    assert_equal(module[1], causal_lm("llama", seed=3))
    assert not is_meta(module[0].weight) and module[0].weight.isfinite().all()


def test_empty_weights_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(5)
    with accelerate.init_empty_weights():
        module = transformers.AutoModelForCausalLM.from_config(config("llama"))
    assert is_meta(module.lm_head.weight) and not is_meta(module.model.rotary_emb.inv_freq)
    torch.manual_seed(5)
    Materializer(module, "auto", lambda _: None).fill(module, CPU)
    torch.manual_seed(5)
    assert_equal(module, transformers.AutoModelForCausalLM.from_config(config("llama")))


# -- checkpoints -----------------------------------------------------------------------------------------------------


def saved(path: Path, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    model = causal_lm(kind, seed=11).to(dtype)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
def test_the_checkpoint_that_the_configuration_names(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    wanted = saved(tmp_path, kind, dtype)

    def make() -> Any:
        named = transformers.AutoConfig.from_pretrained(tmp_path)
        return transformers.AutoModelForCausalLM.from_config(named, dtype=torch.float32)

    module, notes = filled(make)
    for name, tensor in wanted.state_dict().items():
        assert module.state_dict()[name].dtype == torch.float32
        assert torch.equal(module.state_dict()[name], tensor.float()), name
    assert torch.isfinite(loss_of(module))
    if dtype == torch.float32:  # a cast of the whole model would have rounded its rotary frequencies too
        assert torch.equal(loss_of(module), loss_of(causal_lm(kind, seed=11)))
    assert str(tmp_path) in notes[0]
    fresh, notes = filled(make, "init")
    assert "own initialisers" in notes[0] and not torch.equal(fresh.lm_head.weight, module.lm_head.weight)
    elsewhere, _ = filled(lambda: transformers.AutoModelForCausalLM.from_config(config(kind)), str(tmp_path))
    assert torch.equal(elsewhere.lm_head.weight, module.lm_head.weight)


def test_a_new_head_on_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    named = transformers.AutoConfig.from_pretrained(tmp_path, num_labels=3)
    module, notes = filled(lambda: transformers.AutoModelForSequenceClassification.from_config(named))
    assert torch.equal(module.model.norm.weight, torch.ones(32))
    assert module.score.weight.isfinite().all() and 0 < module.score.weight.std() < 0.1
    assert any("newly initialised: score.weight" in n for n in notes), notes


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    def make() -> Any:
        named = config("llama")
        named._name_or_path = str(tmp_path / "nowhere")
        return transformers.AutoModelForCausalLM.from_config(named)

    with pytest.raises(Unloadable, match=r"nowhere.*weights='init'"):
        filled(make)
    filled(make, "init")


def test_a_checkpoint_of_other_shapes(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    named = transformers.AutoConfig.from_pretrained(tmp_path, vocab_size=120)
    with pytest.raises(Unloadable):
        filled(lambda: transformers.AutoModelForCausalLM.from_config(named))


def test_adapters_on_a_base_of_meta(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    wanted = saved(tmp_path, "llama")

    def make() -> Any:
        base = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
        return peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))

    module, _ = filled(make)
    attention = module.base_model.model.model.layers[1].self_attn.q_proj
    assert torch.equal(attention.base_layer.weight, wanted.model.layers[1].self_attn.q_proj.weight)
    assert attention.lora_B.default.weight.eq(0).all()
    assert attention.lora_A.default.weight.std() > 0.01
    assert not attention.base_layer.weight.requires_grad and attention.lora_A.default.weight.requires_grad
    head = module.base_model.model.lm_head
    assert torch.equal(head.modules_to_save.default.weight, wanted.lm_head.weight)
    assert torch.allclose(loss_of(module), loss_of(wanted.train(module.training)))
