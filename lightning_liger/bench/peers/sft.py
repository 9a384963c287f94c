"""TRL's SFTTrainer: padded, padding-free and packed."""

from __future__ import annotations

import uuid
from typing import Any

from lightning_liger.bench.messages import Ready
from lightning_liger.bench.peers.here import needs_cuda, not_installed
from lightning_liger.bench.peers.huggingface import arguments, flash_attention, train
from lightning_liger.bench.peers.session import Session, labels
from lightning_liger.bench.task import Sample
from lightning_liger.bench.variants import Variant

NAME = "trl"
_PADDED = "TRL's SFTTrainer, padded batches; it has a fused head of its own and computes an entropy and an accuracy"
_PADDING_FREE = "the same with padding_free=True (FlashAttention where transformers finds it, else a mask)"
_PACKED = "the same with packing=True: best-fit decreasing rows of as many tokens as +token batches fills, one a step"


def variants(plain: Ready | None, budget: int | str) -> list[Variant]:
    """Rows of the table."""
    missing = not_installed("trl", "datasets", "accelerate")
    liger = missing or not_installed("liger-kernel") or needs_cuda(plain, "Liger's kernels")

    def row(name: str, meaning: str, skipped: str, **arguments: Any) -> Variant:
        packed = "tokens" in arguments
        return Variant(
            name,
            meaning,
            None,
            peer=NAME,
            arguments=arguments,
            same_batches=not packed,
            own_batches=packed,
            skipped=skipped,
        )

    kernels = "with use_liger_kernel=True, whose fused loss SFTTrainer leaves out"
    return [
        row("TRL", _PADDED, missing),
        row("TRL flat", _PADDING_FREE, missing, flat=True),
        row("TRL packed", _PACKED, missing, tokens=budget),
        row("TRL Liger flat", f"TRL flat {kernels}", liger, flat=True, liger=True),
        row("TRL Liger packed", f"TRL packed {kernels}", liger, tokens=budget, liger=True),
    ]


def run(session: Session, *, liger: bool = False, flat: bool = False, tokens: int = 0) -> None:
    """
    Args:
        liger: ``use_liger_kernel``.
        flat: ``padding_free``.
        tokens: of a packed row; 0 for batches like plain's.
    """
    from datasets import disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    model = session.model()
    if flat or tokens:
        model.set_attn_implementation(flash_attention())
    if tokens:
        samples, rows = session.samples(tokens), 1
    else:
        batches = session.batches()
        samples, rows = [sample for batch in batches for sample in batch], len(batches[0])
    config = SFTConfig(
        **arguments(
            session,
            use_liger_kernel=liger,
            per_device_train_batch_size=rows,
            gradient_checkpointing=False,
            remove_unused_columns=True,
            padding_free=flat,
            packing=bool(tokens),
            max_length=tokens or None,
        )
    )
    given = {
        "model": model,
        "args": config,
        "train_dataset": _dataset(samples),
        "processing_class": tokenizer(model.config.vocab_size),
    }
    train(session, SFTTrainer, given, seen=_documents)


def _dataset(samples: list[Sample]) -> Any:
    """Named by hand: hashing a table fails under some versions of pyarrow."""
    import pyarrow
    from datasets import Dataset

    columns = {"input_ids": [s[0].tolist() for s in samples], "labels": [labels(s).tolist() for s in samples]}
    return Dataset(pyarrow.table(columns), fingerprint=uuid.uuid4().hex)


def _documents(rows: list[dict[str, Any]]) -> list[Sample]:
    """What is in rows, one document or several each."""
    import torch

    found = []
    for row in rows:
        ids, wanted = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        lengths = row.get("seq_lengths") or [len(ids)]
        pairs = zip(ids.split(lengths), wanted.split(lengths), strict=True)
        found += [(one, int((label == -100).sum())) for one, label in pairs]
    return found


def tokenizer(vocabulary: int) -> Any:
    """It is asked for a token to pad with, and for nothing else."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({"<pad>": 0, "<eos>": vocabulary - 1}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")
