"""Pairs of a better and a worse answer, and single answers with a thumb up or down, as padded batches.

A row of the file may bring its own ``rejected`` (``{"prompt", "chosen", "rejected"}``); where there is none, the worse answer
is the right answer to another question.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sft_data import DataError, Pair, pad, to_pair
from sft_module import Batch, pretrained_arguments


class Preference(NamedTuple):
    prompt: str
    chosen: str
    rejected: str


def read_preferences(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[Preference]:
    """The rows of a JSON-lines file.

    Raises:
        DataError: a row that is none, or too few rows to take worse answers from.
    """
    found: list[Preference] = []
    answered: list[Pair] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if isinstance(row, dict) and {"prompt", "chosen", "rejected"} <= row.keys():
                found.append(Preference(str(row["prompt"]), str(row["chosen"]), str(row["rejected"])))
            else:
                answered.append(to_pair(row, tokenizer))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    if len(answered) == 1 or (not found and not answered):
        raise DataError(f"{path}: at least two rows are needed, so that one's answer is the worse one of another's")
    others = answered[1:] + answered[:1]
    pairs = zip(answered, others, strict=True)
    return found + [Preference(pair.prompt, pair.completion, other.completion) for pair, other in pairs]


def encode_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, max_length: int
) -> dict[str, list[int]]:
    """Token ids, and labels with -100 for the prompt; of a long prompt the end is kept, of an answer its begin."""
    asked = tokenizer(prompt)["input_ids"][-(max_length // 2) :]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    told = [*tokenizer(answer, add_special_tokens=False)["input_ids"], *end][: max_length - len(asked)]
    return {"input_ids": [*asked, *told], "labels": [-100] * len(asked) + told}


class PreferenceDataModule(L.LightningDataModule):
    """Batches with ``chosen_...`` and ``rejected_...``, or with one answer per prompt for KTO.

    Args:
        data: JSON lines.
        tokenizer: checkpoint directory or name.
        batch_size: prompts in a batch.
        max_length: of prompt and answer together, in tokens.
        unpaired: batches for KTO: an answer, whether it is ``desirable``, and another prompt's answer as ``kl_...``.
        seed: of the order.
    """

    def __init__(
        self,
        data: str,
        tokenizer: str,
        batch_size: int = 8,
        max_length: int = 512,
        unpaired: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(**pretrained_arguments(self.hparams["tokenizer"]))
        self.rows = read_preferences(self.hparams["data"], self.tokenizer)

    def _padded(self, prefix: str, prompts: Sequence[str], answers: Sequence[str]) -> Batch:
        size, pad_id = self.hparams["max_length"], self.tokenizer.pad_token_id or 0
        rows = [encode_answer(self.tokenizer, *pair, size) for pair in zip(prompts, answers, strict=True)]
        return {f"{prefix}{name}": value for name, value in pad(rows, pad_id).items()}

    def collate(self, rows: list[Preference]) -> Batch:
        prompts = [row.prompt for row in rows]
        if not self.hparams["unpaired"]:
            chosen = self._padded("chosen_", prompts, [row.chosen for row in rows])
            return {**chosen, **self._padded("rejected_", prompts, [row.rejected for row in rows])}
        desirable = [index % 2 == 0 for index in range(len(rows))]
        answers = [row.chosen if good else row.rejected for row, good in zip(rows, desirable, strict=True)]
        batch = self._padded("", prompts, answers)
        # KTO's baseline: each prompt with the answer to the next one
        return {
            **batch,
            **self._padded("kl_", prompts, answers[1:] + answers[:1]),
            "desirable": torch.tensor(desirable),
        }

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self.rows,  # type: ignore[arg-type]
            batch_size=self.hparams["batch_size"],
            shuffle=True,
            drop_last=True,
            collate_fn=self.collate,
            generator=torch.Generator().manual_seed(self.hparams["seed"]),
        )
