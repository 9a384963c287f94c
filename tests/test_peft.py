"""Adapters of PEFT in a training: whatever kind, wherever they sit, and however a step switches them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from helpers import Plain, Run, assert_engaged, assert_same, both, causal_lm, collate, documents, fit, loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYWHERE = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]


def moved(model: Any) -> Any:
    """With adapters that change something: they begin at zero, and could be forgotten without a difference."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model.train()


def adapted(config: Callable[[], Any], kind: str = "llama") -> Callable[[], Plain]:
    def make() -> Plain:
        torch.manual_seed(0)
        return Plain(moved(peft.get_peft_model(causal_lm(kind), config())), lr=0.05)

    return make


def lora(**options: Any) -> Callable[[], Any]:
    return lambda: peft.LoraConfig(r=4, lora_alpha=8, **options)


TIED = {"ensure_weight_tying": True}
KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "dora everywhere": (lora(target_modules=EVERYWHERE, use_dora=True), "llama"),
    "saved whole, tied": (lora(target_modules=["q_proj"], modules_to_save=["embed_tokens"], **TIED), "qwen2"),
    "lora on embedding and head, tied": (lora(target_modules=["q_proj", "embed_tokens", "lm_head"], **TIED), "qwen2"),
    "new tokens": (lora(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 4]}), "llama"),
    "new tokens, tied": (lora(target_modules=["q_proj"], trainable_token_indices=[3, 4, 5]), "qwen2"),
    "ia3": (lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "llama"),
    "oft": (lambda: peft.OFTConfig(target_modules=ATTENTION, oft_block_size=4, r=0), "llama"),
    "vera": (lambda: peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=4), "llama"),
    "norms": (lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]), "llama"),
}


@pytest.mark.parametrize("name", list(KINDS))
def test_kinds_of_adapters(name: str) -> None:
    plain, ours = both(adapted(*KINDS[name]), loader, max_steps=2)
    assert_same(plain, ours)
    assert_engaged(ours)
    assert ours.report["padding_free"]["packed_calls"] == ours.report["padding_free"]["calls"]


# -- switched within a step ------------------------------------------------------------------------------------------


class Preference(Plain):
    """DPO whose reference is the same model: without its adapter, or with another one."""

    def __init__(self, reference: str, whole: bool) -> None:
        torch.manual_seed(0)
        model = peft.get_peft_model(causal_lm("llama"), lora(target_modules=[*ATTENTION, "lm_head"])(), "policy")
        if reference:
            model.add_adapter(reference, lora(target_modules=[*ATTENTION, "lm_head"])())
        super().__init__(moved(model), lr=0.05)
        if reference:
            for name, p in model.named_parameters():
                if f".{reference}." in name:
                    p.data.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(9)))
        self.reference, self.whole = reference, whole

    def _logits(self, batch: Any) -> Tensor:
        found: Tensor = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        return found

    def _score(self, logits: Tensor, batch: Any) -> Tensor:
        labels = batch["labels"][:, 1:]
        found = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        return (found * (labels != -100)).sum(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            if self.reference:
                self.model.set_adapter(self.reference)
                before = self._logits(batch)
                self.model.set_adapter("policy")
            else:
                with self.model.disable_adapter():
                    before = self._logits(batch)
        # read where the adapters are switched back
        reference = self._score(before, batch)
        if self.whole:
            reference = reference + 1e-2 * before.logsumexp(-1).sum(-1)
        gain = self._score(self._logits(batch), batch) - reference
        return -nn.functional.logsigmoid(0.1 * gain).mean()


@pytest.mark.parametrize("whole", [False, True], ids=["labels", "padding too"])
@pytest.mark.parametrize("reference", ["", "reference"], ids=["switched off", "another"])
def test_adapters_switched_within_a_step(reference: str, whole: bool) -> None:
    options: dict[str, Any] = {"precision": "64-true", "max_steps": 3}
    plain, ours = (
        fit(Preference(reference, whole), loader(), callback, **options)
        for callback in (None, LigerCallback(verbose=False, bf16=False))
    )
    assert_same(plain, ours, loss=1e-9, gradient=1e-9, parameter=1e-9)
    assert_engaged(ours)


class Grows(Plain):
    """Gets its adapter, and later a second one, while it trains."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)
        if batch_idx == 0:
            self.model = peft.get_peft_model(self.model, lora(target_modules=["q_proj"])())
        if batch_idx == 2:
            self.model.add_adapter("second", lora(target_modules=["q_proj", "lm_head"])())
            self.model.set_adapter("second")


def test_adapters_that_come_while_training() -> None:
    plain, ours = both(lambda: Grows(causal_lm("llama")), loader)
    assert_same(plain, ours)
    assert_engaged(ours)


def test_dropout_of_adapters_draws_the_same_numbers_where_nothing_is_padded() -> None:
    def rows() -> Any:
        equal = [d for d in documents(400) if len(d.ids) == 20]
        return DataLoader(equal[:8], batch_size=4, collate_fn=collate)  # type: ignore[arg-type]

    make = adapted(lora(target_modules=[*ATTENTION, "lm_head"], lora_dropout=0.3))
    plain, ours = both(make, rows, max_epochs=1, max_steps=-1)
    assert_same(plain, ours)
    assert_engaged(ours, packed=False)
    without = both(adapted(lora(target_modules=[*ATTENTION, "lm_head"])), rows, max_epochs=1, max_steps=-1)[0]
    assert abs(without.losses[0] - plain.losses[0]) > 1e-4


# -- rows that differ ------------------------------------------------------------------------------------------------


class Mixed(Plain):
    """Evaluates each row with another adapter."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = peft.get_peft_model(causal_lm("llama"), lora(target_modules=["q_proj", "v_proj"])())
        model.add_adapter("other", lora(target_modules=["q_proj"])())
        super().__init__(moved(model))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        names = ["default", "__base__", "other", "default"]
        self.log("mixed", self.model(**batch, adapter_names=names).loss)


def test_an_adapter_for_each_row() -> None:
    plain, ours = both(
        Mixed, loader, val=loader, limit_val_batches=1, val_check_interval=1.0, max_epochs=1, max_steps=-1
    )
    assert_same(plain, ours)
    assert ours.metrics["mixed"] == pytest.approx(plain.metrics["mixed"], rel=1e-5)
    assert_engaged(ours)
    assert "adapter_names= gives each row an adapter of its own" in ours.report["padding_free"]["off"]


def test_an_adapter_that_begins_at_a_token() -> None:
    config = lora(target_modules=["q_proj", "v_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM")

    def rows() -> Any:
        chosen = documents(8)
        for d in chosen:
            d.ids[len(d.ids) // 2] = 5
        return DataLoader(chosen, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]

    plain, ours = both(adapted(config), rows, max_steps=2)
    assert_same(plain, ours)
    assert any("activated LoRA" in reason for reason in ours.report["padding_free"]["off"])


# -- what comes out --------------------------------------------------------------------------------------------------


class Merges(Plain):
    """Exports as people do: the adapters, then the merged model, right at the end of training."""

    def __init__(self, out: Path) -> None:
        super().__init__(
            adapted(lora(target_modules=["q_proj", "down_proj", "lm_head"], use_dora=True))().model, lr=0.05
        )
        self.out = out

    def on_train_end(self) -> None:
        self.model.save_pretrained(self.out / "adapter")
        self.model.merge_and_unload().save_pretrained(self.out / "merged")


def test_merged_exports(tmp_path: Path) -> None:
    ids = torch.arange(3, 43).view(2, 20)
    found: list[Tensor] = []
    runs: list[Run] = []
    for name, callback in (("plain", None), ("ours", LigerCallback(verbose=False))):
        runs.append(fit(Merges(tmp_path / name), loader(), callback))
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "merged")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apart = peft.PeftModel.from_pretrained(causal_lm("llama"), str(tmp_path / name / "adapter"))
        with torch.no_grad():
            found.append(merged.eval()(ids).logits)
            torch.testing.assert_close(found[-1], apart.eval()(ids).logits, rtol=1e-4, atol=1e-5)
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)
    assert_engaged(runs[1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


# -- a base in four bits ---------------------------------------------------------------------------------------------


def four_bit(where: Path) -> Any:
    """QLoRA as its tutorials do it."""
    if not where.exists():
        causal_lm("llama").save_pretrained(where)
    quantised = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(where, quantization_config=quantised, device_map="cpu")
    model = peft.prepare_model_for_kbit_training(model)
    torch.manual_seed(0)
    return Plain(moved(peft.get_peft_model(model, lora(target_modules="all-linear")())), lr=0.05)


def test_qlora(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    plain, ours = both(lambda: four_bit(tmp_path / "model"), loader, max_steps=2)
    assert ours.trainer.lightning_module.model.get_base_model().model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    assert_same(plain, ours)
    assert_engaged(ours)
