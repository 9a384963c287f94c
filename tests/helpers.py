"""Tiny models, ragged documents, and one function that trains a module and writes down all that happened."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import lightning as L
import torch
import torch.nn as nn
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback
from lightning_liger.trees import callback_bases

VOCAB = 97
PAD = 0

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config(kind: str = "qwen2", **changes: Any) -> Any:
    """The configuration of a model that trains in milliseconds; dropout off, because it draws by shape."""
    if kind == "qwen2":
        return transformers.Qwen2Config(**{**_SIZES, "tie_word_embeddings": True, **changes})
    if kind == "llama":
        return transformers.LlamaConfig(**{**_SIZES, "tie_word_embeddings": False, **changes})
    if kind == "gemma2":
        own = {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 10.0}
        own["query_pre_attn_scalar"] = 8
        return transformers.Gemma2Config(**{**_SIZES, **own, **changes})
    if kind == "gpt2":
        own = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": PAD}
        own |= {"bos_token_id": 1, "eos_token_id": 2}
        own |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2Config(**{**own, **changes})
    raise ValueError(kind)


def causal_lm(kind: str = "qwen2", seed: int = 0, **changes: Any) -> Any:
    """The same weights for the same arguments, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config(kind, **changes)).train()


# -- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    ids: Tensor
    prompt: int


def documents(count: int = 16, seed: int = 0, longest: int = 24) -> list[Document]:
    """Documents of very different lengths, each with a prompt that is not to be learnt."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(3, longest + 1, (1,), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        made.append(Document(ids, int(torch.randint(1, length, (1,), generator=generator))))
    return made


def collate(batch: list[Document], side: str = "right") -> dict[str, Tensor]:
    """The usual collate: padded to the longest, -100 on prompts and padding."""
    longest = max(len(d.ids) for d in batch)
    ids = torch.full((len(batch), longest), PAD)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, document in enumerate(batch):
        n = len(document.ids)
        start = 0 if side == "right" else longest - n
        ids[row, start : start + n] = document.ids
        mask[row, start : start + n] = 1
        labels[row, start + document.prompt : start + n] = document.ids[document.prompt :]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def collate_left(batch: list[Document]) -> dict[str, Tensor]:
    return collate(batch, "left")


def collate_tuple(batch: list[Document]) -> tuple[Tensor, ...]:
    return tuple(collate(batch).values())


def collate_shifted(batch: list[Document]) -> dict[str, Tensor]:
    """Labels moved one to the left already, as nanoGPT-like code does, under another name."""
    made = collate(batch)
    labels = torch.full_like(made["labels"], -100)
    labels[:, :-1] = made["labels"][:, 1:]
    return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"], "targets": labels}


def loader(
    function: Callable[[list[Document]], Any] = collate, *, count: int = 16, batch_size: int = 4, seed: int = 0
) -> DataLoader[Any]:
    return DataLoader(documents(count, seed), batch_size=batch_size, collate_fn=function)  # type: ignore[arg-type]


def real_tokens(batches: Iterable[dict[str, Tensor]]) -> int:
    return sum(int(b["attention_mask"].sum()) for b in batches)


# -- training --------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What one training run did."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    trainer: Any = None


class Recorder(*callback_bases()):  # type: ignore[misc]
    """Writes down losses and gradients; for Trainers of both trees."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is not None:
            self.run.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.named_parameters()
        self.run.gradients.append({n: p.grad.detach().clone() for n, p in named if p.grad is not None})


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 4,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}


def fit(
    module: Any,
    data: Any,
    callback: LigerCallback | None = None,
    *,
    tree: Any = L,
    ckpt_path: str | None = None,
    val: Any = None,
    **trainer_options: Any,
) -> Run:
    """Train ``module`` with or without our callback; ``trainer_options`` go to the Trainer."""
    run = Run()
    others = list(trainer_options.pop("callbacks", []))
    ours = [] if callback is None else [callback]
    trainer = tree.Trainer(callbacks=[Recorder(run), *others, *ours], **{**QUIET, **trainer_options})
    trainer.fit(module, data, val, ckpt_path=ckpt_path)
    run.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    run.metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    run.report = {} if callback is None else callback.report.to_dict()
    run.trainer = trainer
    return run


def both(make: Callable[[], Any], data: Callable[[], Any], **options: Any) -> tuple[Run, Run]:
    """The same module trained plain and accelerated, from the same seed."""
    runs = []
    val = options.pop("val", None)
    for callback in (None, LigerCallback(verbose=False)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            runs.append(fit(make(), data(), callback, val=val() if val else None, **options))
    return runs[0], runs[1]


# -- comparing -------------------------------------------------------------------------------------------------------


def relative(a: Tensor, b: Tensor) -> float:
    """``|a - b| / |b|`` over all entries at once."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def relative_all(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to the norm of all of them together.

    Some gradients are zero up to rounding (the bias of a key projection), so that their own norm says nothing.
    """
    assert a.keys() == b.keys()
    whole = sum(float(t.double().norm() ** 2) for t in b.values()) ** 0.5
    return max(float((a[n].double() - b[n].double()).norm()) for n in b) / max(whole, 1e-12)


@dataclass(frozen=True)
class Difference:
    loss: float
    gradient: float
    parameter: float


def difference(plain: Run, other: Run) -> Difference:
    assert len(plain.losses) == len(other.losses) > 0
    assert len(plain.gradients) == len(other.gradients)
    return Difference(
        max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(plain.losses, other.losses, strict=True)),
        max((relative_all(b, a) for a, b in zip(plain.gradients, other.gradients, strict=True)), default=0.0),
        relative_all(other.parameters, plain.parameters),
    )


def assert_same(plain: Run, other: Run, *, loss: float = 1e-5, gradient: float = 2e-5, parameter: float = 1e-5) -> None:
    found = difference(plain, other)
    assert found.loss <= loss, found
    assert found.gradient <= gradient, found
    assert found.parameter <= parameter, found


def assert_engaged(run: Run, *, packed: bool = True, fused: bool = True) -> None:
    """Equality proves nothing if the accelerated run was a plain one."""
    assert (run.report["padding_free"]["packed_calls"] > 0) == packed, run.report
    assert (run.report["fused_head"]["fused_calls"] > 0) == fused, run.report


class Plain(L.LightningModule):
    """A LightningModule as people write them: a model, a step, an optimizer."""

    model: Any

    def __init__(self, model: nn.Module | None = None, lr: float = 0.2) -> None:
        super().__init__()
        if model is not None:
            self.model = model
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        # not Adam: it divides tiny gradients by themselves, and their rounding with them
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


class Twice(torch.autograd.Function):
    """An autograd function of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def leave() -> NoReturn:
    """End a worker whose comparisons have all passed; gloo's threads need not survive the end of the interpreter."""
    sys.stdout.flush()
    os._exit(0)
