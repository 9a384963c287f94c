"""Unsloth's FastLanguageModel, fully fine-tuned, under Hugging Face's Trainer."""

from __future__ import annotations

import tempfile
from typing import Any

from lightning_liger.bench.messages import Ready
from lightning_liger.bench.peers.here import needs_cuda, not_installed
from lightning_liger.bench.peers.session import Session
from lightning_liger.bench.variants import Variant

NAME = "unsloth"
_MEANING = (
    "Unsloth's FastLanguageModel (full_finetuning, no gradient checkpointing) in Hugging Face's Trainer, padded batches"
)


def variants(plain: Ready | None, budget: int | str) -> list[Variant]:
    """Rows of the table."""
    skipped = not_installed("unsloth", "unsloth_zoo", "trl", "datasets") or needs_cuda(plain, "its kernels")
    return [Variant("Unsloth", _MEANING, None, peer=NAME, skipped=skipped)]


def run(session: Session) -> None:
    """It reads models from folders only, so that the plain run's weights are written to one."""
    from unsloth import FastLanguageModel  # before transformers, of which it replaces parts

    from lightning_liger.bench.peers.huggingface import arguments, train
    from lightning_liger.bench.peers.sft import tokenizer

    plain = session.model()
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        tokenizer(plain.config.vocab_size).save_pretrained(folder)
        del plain
        model: Any
        model, _ = FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=2048,
            dtype=session.dtype,
            load_in_4bit=False,
            full_finetuning=True,
            use_gradient_checkpointing=False,
            local_files_only=True,
        )
    from transformers import Trainer, TrainingArguments

    batches = session.batches()
    given = {
        "model": model,
        "args": TrainingArguments(**arguments(session, per_device_train_batch_size=len(batches[0]))),
        "train_dataset": [sample for batch in batches for sample in batch],
        "data_collator": session.task.collate,
    }
    train(session, Trainer, given, seen=list)
