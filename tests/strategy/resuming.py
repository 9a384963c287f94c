"""A module with everything that makes resuming hard, a loader that knows where it is, and one function that trains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytorch_lightning as pl
import torch
import torch.nn as nn
from helpers import PAD, VOCAB, Recorder, Run, causal_lm
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_liger.parallel.pieces import gather

ACCELERATOR = os.environ.get("TEST_ACCELERATOR", "cpu")
DEVICE = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if ACCELERATOR == "gpu" else "cpu")
# gradients of embeddings are summed in any order on a GPU
EXACT = 1e-6 if ACCELERATOR == "cpu" else 2e-5
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, EPOCHS, ROWS = 4, 2, 4  # optimizer steps in an epoch, epochs, rows in a global batch
LOSSES = STEPS * EPOCHS

QUIET: dict[str, Any] = {
    "accelerator": ACCELERATOR,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": EPOCHS,
    "use_distributed_sampler": False,
}


class Batches:
    """The same global batches on any number of ranks, of equal weight for each; remembers how far it came."""

    def __init__(self, rank: int, ranks: int, parts: int = 1) -> None:
        self.rank, self.ranks, self.parts = rank, ranks, parts
        self.position = self.start = 0

    def __len__(self) -> int:
        return STEPS * self.parts

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        start, self.start = self.start, 0
        for i in range(start, len(self)):
            generator = torch.Generator().manual_seed(100 + i)
            ids = torch.randint(3, VOCAB, (ROWS, 12), generator=generator)
            mask = torch.ones_like(ids)
            ids[::2, 9:] = PAD
            mask[::2, 9:] = 0
            labels = torch.where(torch.arange(12) < 8, ids, -100)
            mine = slice(self.rank * ROWS // self.ranks, (self.rank + 1) * ROWS // self.ranks)
            self.position = i + 1
            yield {"input_ids": ids[mine], "attention_mask": mask[mine], "labels": labels[mine]}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"] % len(self)


class _Hard:
    """Tied weights, a frozen norm, a parameter of its own, one that never trains, two groups, a schedule, hparams."""

    def __init__(self: Any, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = causal_lm("qwen2")
        self.model.model.norm.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.spare = nn.Linear(5, width)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        loss = self.model(**batch).loss * self.scale.mean()
        self.log("loss", loss)
        return loss

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self: Any) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1 and p.requires_grad]
        # eps: an Adam step of a gradient that is mere rounding would be as large as any other
        optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], 1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=LOSSES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Hard(_Hard, L.LightningModule):
    """Of one tree."""


class HardPL(_Hard, pl.LightningModule):
    """Of the other."""


def train(
    module: Any,
    *,
    ranks: int,
    strategy: Any,
    folder: Any = None,
    ckpt_path: Any = None,
    every: int = 3,
    tree: Any = L,
    **options: Any,
) -> Run:
    """Train to the end of the last epoch, from the start or from a checkpoint; save every few steps."""
    run = Run()
    callbacks = [Recorder(run), *options.pop("callbacks", [])]
    if folder is not None:
        kept = {"save_top_k": -1, "every_n_train_steps": every, "filename": "{step}"}
        callbacks.append(
            (ModelCheckpoint if tree is L else pl.callbacks.ModelCheckpoint)(
                dirpath=folder, enable_version_counter=False, **kept
            )
        )
    parts = options.get("accumulate_grad_batches", 1)
    val = options.pop("val", None)
    fit = {k: options.pop(k) for k in ("weights_only",) if k in options}
    devices: Any = ranks if ranks > 1 or ACCELERATOR == "cpu" else [DEVICE.index]
    trainer = tree.Trainer(
        devices=devices,
        strategy=strategy,
        callbacks=callbacks,
        **{"enable_checkpointing": folder is not None, **QUIET, **options},
    )
    trainer.fit(module, Batches(RANK % ranks, ranks, parts), val, ckpt_path=ckpt_path, **fit)
    run.parameters = whole(module.state_dict())
    run.trainer = trainer
    return run


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Copies on the CPU. Every rank gets all of each."""
    return {n: _whole(t) for n, t in tensors.items()}


def _whole(tensor: Any) -> Tensor:
    return (gather(tensor) if isinstance(tensor, DTensor) else tensor.detach()).cpu().clone()


def mean_over_ranks(values: list[float]) -> list[float]:
    if WORLD == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    torch.distributed.all_reduce(tensor)
    return list((tensor / WORLD).tolist())


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to the norm of all."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    norm = sum(float(t.double().norm() ** 2) for t in b.values()) ** 0.5
    return max(float((a[n].double() - b[n].double()).norm()) for n in b) / norm


def worst(a: list[float], b: list[float]) -> float:
    """The largest relative difference of losses."""
    assert len(a) == len(b) > 0, (len(a), len(b))
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))
