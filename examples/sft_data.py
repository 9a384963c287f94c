"""Rows of a JSON-lines file as (prompt, completion) pairs and padded batches, and a tokenizer when there is none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

ACCEPTED = """each line is one JSON object, in one of these shapes:
  {"question": "...", "answer": "..."}
  {"prompt": "...", "completion": "..."}
  {"messages": [{"role": "user", "content": "..."}, ..., {"role": "assistant", "content": "..."}]}
  {"text": "..."}"""


class DataError(ValueError):
    """A row that cannot be trained on; the message says where it is and what would be accepted."""


class Pair(NamedTuple):
    prompt: str
    completion: str


def _fields(row: dict[str, Any], *names: str) -> list[str]:
    for name in names:
        if not isinstance(row[name], str):
            raise ValueError(f'"{name}" is not a string')
    if not row[names[-1]].strip():
        raise ValueError(f'"{names[-1]}" is empty, so there is nothing to learn')
    return [row[name] for name in names]


def _conversation(messages: Any, tokenizer: PreTrainedTokenizerBase | None) -> Pair:
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" is not a list of messages')
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError('each of "messages" needs a "role" and a "content", both strings')
    *before, last = messages
    if last["role"] != "assistant" or not last["content"].strip():
        raise ValueError('the last of "messages" is not an answer of the assistant')
    if tokenizer is not None and tokenizer.chat_template:
        prompt = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        # Some templates rewrite earlier turns; then the answer alone is still the right completion.
        return Pair(prompt, whole[len(prompt) :] if whole.startswith(prompt) else last["content"])
    lines = [f"{message['role']}: {message['content']}\n" for message in before]
    return Pair("".join(lines) + "assistant: ", last["content"])


def to_pair(row: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> Pair:
    if not isinstance(row, dict):
        raise ValueError(f"the line holds a {type(row).__name__}, not an object")
    for prompt, completion in (("question", "answer"), ("prompt", "completion")):
        if prompt in row and completion in row:
            asked, answered = _fields(row, prompt, completion)
            return Pair(asked if asked.endswith((" ", "\n")) else asked + "\n", answered)
    if "messages" in row:
        return _conversation(row["messages"], tokenizer)
    if "text" in row:
        return Pair("", *_fields(row, "text"))
    raise ValueError(f"none of the accepted fields among {', '.join(map(repr, row)) or 'no fields at all'}")


def read_pairs(path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> list[Pair]:
    path = Path(path)
    pairs = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            pairs.append(to_pair(json.loads(line), tokenizer))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error.msg}); {ACCEPTED}") from None
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}; {ACCEPTED}") from None
    if not pairs:
        raise DataError(f"{path}: no rows; {ACCEPTED}")
    return pairs


def encode(
    pairs: Iterable[Pair], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[dict[str, list[int]]]:
    """Token ids and labels of each pair; the prompt is context, only the completion is learnt."""
    pairs = list(pairs)
    prompts = tokenizer([pair.prompt for pair in pairs])["input_ids"]
    completions = tokenizer([pair.completion for pair in pairs], add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for prompt, completion in zip(prompts, completions, strict=True):
        input_ids = [*prompt, *completion, *end][:max_length]
        labels = [*([-100] * len(prompt)), *completion, *end][:max_length]
        # A prompt that fills the whole window leaves nothing to learn.
        if any(label != -100 for label in labels[1:]):
            yield {"input_ids": input_ids, "labels": labels}


def pad(rows: Iterable[dict[str, list[int]]], pad_id: int) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels`` of shape ``(B, S)``, padded to the longest row; labels with -100."""
    rows = list(rows)
    longest = max(len(row["input_ids"]) for row in rows)
    input_ids = torch.full((len(rows), longest), pad_id)
    attention_mask, labels = torch.zeros_like(input_ids), torch.full_like(input_ids, -100)
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        input_ids[i, :length] = torch.tensor(row["input_ids"])
        attention_mask[i, :length] = 1
        labels[i, :length] = torch.tensor(row["labels"])
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
