"""Hugging Face's Trainer, as it is, with its Liger kernels, and with its collate function that flattens batches."""

from __future__ import annotations

from typing import Any

from lightning_liger.bench.messages import Ready
from lightning_liger.bench.peers.here import needs_cuda, not_installed
from lightning_liger.bench.peers.huggingface import arguments, flash_attention, train
from lightning_liger.bench.peers.session import Session, labels
from lightning_liger.bench.task import Sample
from lightning_liger.bench.variants import Variant

NAME = "trainer"


def variants(plain: Ready | None, budget: int | str) -> list[Variant]:
    """Rows of the table."""
    missing = not_installed("accelerate")
    liger = missing or not_installed("liger-kernel") or needs_cuda(plain, "Liger's kernels")
    flat = "DataCollatorWithFlattening (documents in one row, FlashAttention where transformers finds it, else a mask)"
    return [
        Variant("Trainer", "Hugging Face's Trainer, padded batches", None, peer=NAME, skipped=missing),
        Variant("Trainer flat", f"the same with {flat}", None, peer=NAME, arguments={"flat": True}, skipped=missing),
        Variant(
            "Trainer Liger",
            "the same, padded, with use_liger_kernel=True",
            None,
            peer=NAME,
            arguments={"liger": True},
            skipped=liger,
        ),
        Variant(
            "Trainer Liger flat",
            "the same with use_liger_kernel=True and DataCollatorWithFlattening",
            None,
            peer=NAME,
            arguments={"liger": True, "flat": True},
            skipped=liger,
        ),
    ]


def run(session: Session, *, liger: bool = False, flat: bool = False) -> None:
    """
    Args:
        liger: ``use_liger_kernel``, whose fused loss comes with it.
        flat: batches without padding.
    """
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    model = session.model()
    attention = flash_attention()
    flattening = DataCollatorWithFlattening(return_flash_attn_kwargs=attention != "sdpa")

    def flatten(samples: list[Sample]) -> Any:
        return flattening([{"input_ids": s[0].tolist(), "labels": labels(s).tolist()} for s in samples])

    if flat:
        model.set_attn_implementation(attention)
    batches = session.batches()
    given = {
        "model": model,
        "args": TrainingArguments(
            **arguments(session, use_liger_kernel=liger, per_device_train_batch_size=len(batches[0]))
        ),
        "train_dataset": [sample for batch in batches for sample in batch],
        "data_collator": flatten if flat else session.task.collate,
    }
    train(session, Trainer, given, seen=list)
