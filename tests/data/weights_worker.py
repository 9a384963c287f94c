"""Two ranks and three micro-batches of very different lengths against one process with all of them in one batch."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from helpers import QUIET, Plain, causal_lm, collate, documents, leave
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback

ROWS = [
    row for longest, seed in ((6, 1), (40, 2), (9, 3), (30, 4), (4, 5), (24, 6)) for row in documents(2, seed, longest)
]


class Labels(Plain):
    def __init__(self) -> None:
        super().__init__(causal_lm("llama"), lr=0.1)


class OwnLoss(Labels):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class Manual(Labels):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.model(**batch).loss / 3)
        if batch_idx % 3 == 2:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()


def one_big_batch(clip: float) -> dict[str, Tensor]:
    module = Labels()
    batch = collate(ROWS)
    module.model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
    torch.optim.SGD(module.parameters(), 0.1, momentum=0.9).step()
    return {n: p.detach() for n, p in module.named_parameters()}


class Weights(L.Callback):
    """Reads whole weights where they end, whatever pieces a strategy keeps."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        named = dict(pl_module.named_parameters())
        if any(hasattr(p, "ds_id") for p in named.values()):
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(named.values())):
                self.found = {n: p.detach().clone() for n, p in named.items()}
        else:
            self.found = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in named.items()}


def accumulated(module: L.LightningModule, strategy: Any, normalization: str, clip: float) -> dict[str, Tensor]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    mine = [ROWS[2 * i + k] for i in range(rank * 3, rank * 3 + 3) for k in (0, 1)] if ranks == 2 else ROWS
    options: dict[str, Any] = {} if isinstance(module, Manual) else {"gradient_clip_val": clip}
    if not isinstance(module, Manual):
        options["accumulate_grad_batches"] = 3 * (3 - ranks)
    weights = Weights()
    trainer = L.Trainer(
        strategy=strategy(),
        callbacks=[LigerCallback(verbose=False, loss_normalization=normalization), weights],
        use_distributed_sampler=False,
        **{**QUIET, "devices": ranks, "max_steps": -1, "max_epochs": 1, **options},
    )
    trainer.fit(module, DataLoader(mine, batch_size=2, collate_fn=collate))  # type: ignore[arg-type]
    return weights.found


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    start = dict(Labels().named_parameters())
    step = max(float((b[n] - start[n]).norm()) for n in b)
    return max(float((a[n] - b[n]).norm()) for n in b) / step


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from lightning_liger.strategy import LigerFSDPStrategy

    ddp = partial(DDPStrategy, process_group_backend="gloo")
    fsdp = partial(LigerFSDPStrategy, bf16=False, process_group_backend="gloo")
    whole = one_big_batch(0.5)
    cases: list[tuple[str, Any, Any]] = [
        ("ddp labels", Labels, ddp),
        ("ddp own loss", OwnLoss, ddp),
        ("ddp manual", Manual, ddp),
        ("liger_fsdp labels", Labels, fsdp),
        ("liger_fsdp manual", Manual, fsdp),
    ]
    for name, make, strategy in cases:
        found = distance(accumulated(make(), strategy, "tokens", 0.5), whole)
        if os.environ.get("RANK", "0") == "0":
            print(f"{name}: {found:.1e}", flush=True)
        assert found < 2e-6, (name, found)
    means = distance(accumulated(Labels(), ddp, "batch", 0.5), whole)
    assert means > 1e-2, "the lengths must be so different that the mean of means is another step"


if __name__ == "__main__":
    main()
    leave()
