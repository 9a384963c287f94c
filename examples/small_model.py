"""A model to try things with: a tokenizer for given texts and random weights, saved like any checkpoint.

``python small_model.py`` writes one, and the data that the files of cli/ name, into demo_output/.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from docstrings import write_docstring_pairs
from sft_data import read_pairs, train_tokenizer


@dataclass(frozen=True)
class SmallModel:
    """Sizes of a Qwen2; ``hidden_size`` is a multiple of 64, the size of a head."""

    layers: int
    hidden_size: int
    vocab_size: int
    max_length: int
    seed: int = 0


def save_small_model(texts: Iterable[str], size: SmallModel, directory: Path) -> str:
    """Save tokenizer and model in ``directory``, and say in words what they are."""
    tokenizer = train_tokenizer(texts, size.vocab_size)
    tokenizer.save_pretrained(directory)
    heads = size.hidden_size // 64
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.hidden_size * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=max(2048, size.max_length),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(size.seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    return f"Qwen2 architecture, {model.num_parameters() / 1e6:.1f} M parameters, random weights, seed {size.seed}"


def main() -> None:
    output = Path("demo_output")
    output.mkdir(exist_ok=True)
    write_docstring_pairs(output / "docstrings.jsonl")
    texts = (text for pair in read_pairs(output / "docstrings.jsonl") for text in pair)
    print(save_small_model(texts, SmallModel(2, 128, 4096, 2048), output / "small_model"))


if __name__ == "__main__":
    main()
