"""Exact match by generation on held-out questions, as a LightningModule and a DataModule. They know of no plugin."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from docstrings import docstring_pairs
from sft_data import Pair, encode, read_pairs
from sft_module import SFTDataModule, SFTModule


def final_answer(text: str) -> str:
    """What is compared: what follows the last ``####``, as in GSM8K, or all of it; without commas and outer spaces."""
    return text.rsplit("####", 1)[-1].replace(",", "").strip().casefold()


def kind_pairs() -> list[dict[str, str]]:
    """Questions that a small model can learn from names alone: is it a class, a method, a property or a function?"""
    pairs = []
    for question in dict.fromkeys(pair["question"] for pair in docstring_pairs()):
        name = re.split(r"[`(]", question)[1]
        *owners, _ = name.split(".")
        kind = "method" if owners and owners[-1][:1].isupper() else "function"
        for known in ("class", "property"):
            kind = known if f"the {known} `" in question else kind
        pairs.append({"question": f"What is {name}?", "answer": kind})
    return pairs


class HeldOutDataModule(SFTDataModule):
    """Trains on all rows but every ``every``-th, at most ``limit`` of which are asked in validation.

    Args: see :class:`SFTDataModule`.
    """

    def __init__(
        self,
        data: str,
        tokenizer: str,
        batch_size: int = 16,
        max_length: int = 512,
        seed: int = 0,
        every: int = 10,
        limit: int = 128,
    ) -> None:
        super().__init__(data, tokenizer, batch_size, max_length, seed)
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        pairs, every = read_pairs(self.hparams["data"], self.tokenizer), self.hparams["every"]
        kept = [pair for index, pair in enumerate(pairs) if index % every]
        self.examples = list(encode(kept, self.tokenizer, self.hparams["max_length"]))
        self.questions = pairs[::every][: self.hparams["limit"]]

    def ask(self, pairs: list[Pair]) -> dict[str, Any]:
        """Prompts padded on the left, where generation wants it, and the answers as text."""
        prompts = [self.tokenizer(pair.prompt)["input_ids"][-self.hparams["max_length"] :] for pair in pairs]
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        return {"input_ids": ids, "attention_mask": mask, "answers": [pair.completion for pair in pairs]}

    def val_dataloader(self) -> DataLoader[Any]:
        size = self.hparams["batch_size"]
        return DataLoader(self.questions, batch_size=size, collate_fn=self.ask)  # type: ignore[arg-type]


class AnsweringModule(SFTModule):
    """Fine-tuning whose validation generates and compares.

    Args:
        model: checkpoint directory or name.
        lr: learning rate of AdamW.
        max_new_tokens: of an answer.
    """

    def __init__(self, model: str, lr: float = 3e-4, max_new_tokens: int = 256) -> None:
        super().__init__(model, lr)
        self.save_hyperparameters()
        self.answered: list[tuple[str, str]] = []

    def on_validation_epoch_start(self) -> None:
        self.answered.clear()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        ids: Tensor = batch["input_ids"]
        made = self.model.generate(
            input_ids=ids,
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.hparams["max_new_tokens"],
            do_sample=False,
        )
        tokenizer = self.trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        told = tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
        pairs = [(final_answer(a), final_answer(b)) for a, b in zip(told, batch["answers"], strict=True)]
        self.answered += pairs
        right = sum(a == b for a, b in pairs) / len(pairs)
        self.log("exact_match", right, batch_size=len(pairs), on_epoch=True, sync_dist=True, prog_bar=True)
