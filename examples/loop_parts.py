"""What a loop of one's own needs: a small model, and padded batches of questions and answers. It knows of no plugin."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from docstrings import docstring_pairs
from sft_data import Pair, encode, pad, read_pairs, train_tokenizer

Example = dict[str, list[int]]
Collate = Callable[[list[Example]], dict[str, Tensor]]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all loops share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--plain", action="store_true", help="train without the plugin")
    made.add_argument("--data", help="JSON lines (default: the standard library's docstrings)")
    made.add_argument("--model", help="checkpoint directory (default: a small random Qwen2)")
    made.add_argument("--steps", type=int, default=8)
    made.add_argument("--batch-size", type=int, default=8)
    made.add_argument("--gpu", action="store_true", help="on GPUs, computing in bf16")
    return made


def parts(data: str | None, model: str | None, rows: int = 512) -> tuple[Any, list[Example], Collate]:
    """A model in training mode, tokenised rows, and the function that makes batches of them.

    Args:
        data: JSON lines; the standard library's docstrings if left out.
        model: a checkpoint directory; a small Qwen2 with random weights if left out.
        rows: at most so many of the data.
    """
    pairs = [Pair(row["question"], row["answer"]) for row in docstring_pairs()] if data is None else read_pairs(data)
    pairs = pairs[:rows]
    if model is None:
        tokenizer: Any = train_tokenizer((text for pair in pairs for text in pair), 2048)
        sizes = {"hidden_size": 128, "intermediate_size": 336, "num_hidden_layers": 2, "num_attention_heads": 2}
        torch.manual_seed(0)
        network: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes))
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return network.train(), list(encode(pairs, tokenizer, 256)), partial(pad, pad_id=padding)


def batches(examples: list[Example], collate: Collate, size: int) -> DataLoader[Any]:
    """In the same shuffled order whenever it is made."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(examples, batch_size=size, shuffle=True, collate_fn=collate, generator=generator)  # type: ignore[arg-type]
