"""Models inside of models: vision and language, adapters, prompts, and a Trainer around all of it."""

from __future__ import annotations

from typing import Any

import lightning as L
import peft
import pytest
import torch
import transformers as hf
from comparing import PAD, VOCAB, all_packed, batch, compare, sharpened, with_labels
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback

IMAGE = 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def without_images(seed: int = 0) -> dict[str, Tensor]:
    inputs = batch((9, 14, 6), seed=seed)
    inputs["input_ids"] = inputs["input_ids"].clamp(max=90)
    inputs["labels"] = torch.where(inputs["labels"] < 0, -100, inputs["labels"].clamp(max=90))
    return inputs


def llava() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = hf.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=16)
    config = hf.LlavaConfig(
        vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_id=IMAGE, image_seq_length=4
    )
    return sharpened(hf.LlavaForConditionalGeneration(config))


def with_images(seed: int = 0) -> dict[str, Tensor]:
    inputs = without_images(seed)
    inputs["input_ids"][:, 1:5] = IMAGE
    inputs["labels"][:, 1:5] = -100
    generator = torch.Generator().manual_seed(seed)
    return {**inputs, "pixel_values": torch.randn(3, 3, 8, 8, generator=generator, dtype=torch.float64)}


def test_a_vision_tower_stays_as_it_is_and_its_language_model_is_packed() -> None:
    model = llava()
    report = compare(model, with_labels, with_images(), with_images(1))
    assert all_packed(report), report.off
    assert (report.found, report.applied) == (1, 1)


def qwen2_vl() -> Any:
    torch.manual_seed(0)
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    config = hf.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=95)
    return sharpened(hf.Qwen2VLForConditionalGeneration(config))


def test_positions_of_three_dimensions() -> None:
    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        ids = inputs["input_ids"]
        positions = torch.arange(ids.shape[1]).repeat(3, *ids.shape[:1], 1)
        positions[1:, :, 2:6] = 2  # as an image has them
        return model(**inputs, position_ids=positions).loss

    report = compare(qwen2_vl(), step, without_images())
    assert all_packed(report), report.off
    report = compare(qwen2_vl(), with_labels, without_images(1))
    assert all_packed(report), report.off


@pytest.mark.parametrize("kind", ["paligemma", "gemma3"])
def test_prefixes_that_see_both_ways_are_left_padded(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = hf.SiglipVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=32)
    if kind == "paligemma":
        text = hf.GemmaConfig(**TEXT, head_dim=8)
        config = hf.PaliGemmaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, projection_dim=32)
        model = hf.PaliGemmaForConditionalGeneration(config)
    else:
        text = hf.Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=64)
        config = hf.Gemma3Config(vision_config=vision, text_config=text, image_token_id=IMAGE, mm_tokens_per_image=4)
        model = hf.Gemma3ForConditionalGeneration(config)

    def step(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        types = torch.zeros_like(inputs["input_ids"])
        if kind == "paligemma":
            types[:, 3:] = 1
        return model(**inputs, token_type_ids=types).loss

    report = compare(sharpened(model), step, without_images())
    assert report.packed_calls == 0 and report.off


# -- adapters ----------------------------------------------------------------------------------------------------------


def qwen2() -> Any:
    torch.manual_seed(0)
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT))


def test_lora() -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    report = compare(sharpened(peft.get_peft_model(qwen2(), config)), with_labels, batch(), batch(left=True))
    assert all_packed(report), report.off


def test_prompt_tuning_lengthens_the_mask() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    report = compare(sharpened(peft.get_peft_model(qwen2(), config)), with_labels, batch())
    assert all_packed(report), report.off


def test_prefix_tuning_is_a_cache_and_stays_padded() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    report = compare(sharpened(peft.get_peft_model(qwen2(), config)), with_labels, batch())
    assert report.packed_calls == 0 and "KV cache" in report.off[0]


# -- a Trainer ---------------------------------------------------------------------------------------------------------


class Module(L.LightningModule):
    def __init__(self, model: Any, masked: bool = True) -> None:
        super().__init__()
        self.model, self.masked = model, masked
        self.losses: list[float] = []

    def training_step(self, inputs: dict[str, Tensor], index: int) -> Tensor:
        if not self.masked:
            inputs = {k: v for k, v in inputs.items() if k != "attention_mask"}
        loss = self.model(**inputs).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def encoder() -> Any:
    torch.manual_seed(0)
    own = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.RobertaConfig(vocab_size=VOCAB, pad_token_id=PAD, max_position_embeddings=64, **own)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return hf.RobertaForMaskedLM(config)


def checkpointed() -> Any:
    model = qwen2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def adapted() -> Any:
    return peft.get_peft_model(qwen2(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))


@pytest.mark.parametrize(
    ("build", "masked"),
    [(encoder, True), (llava, True), (checkpointed, True), (checkpointed, False), (adapted, True), (adapted, False)],
)
def test_a_fit_is_the_same(build: Any, masked: bool, tmp_path: Any) -> None:
    batches = [(with_images if build is llava else batch)(seed=n) for n in range(4)]
    losses = []
    for callbacks in ([], [LigerCallback(verbose=False, bf16=False)]):
        module = Module(sharpened(build()), masked)
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=callbacks,
        )  # fmt: skip
        trainer.fit(module, DataLoader(batches, batch_size=None))
        losses.append(module.losses)
    assert len(losses[0]) == 4
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=2e-6, atol=0)
    report = callbacks[0].report.padding
    assert report.packed_calls == 4 and report.padded_runs == 0, report.off
