"""Two processes, run by ``torchrun``: plain and accelerated in each of several set-ups, compared on every rank.

Over gloo on CPUs, or over NCCL on two GPUs with ``TEST_ACCELERATOR=gpu``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import Plain, Run, assert_engaged, causal_lm, collate, documents, fit, leave
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from lightning_liger import LigerCallback

sys.path.append(os.path.join(os.path.dirname(__file__), "padding"))
from decoder_models import Masked

ACCELERATOR = os.environ.get("TEST_ACCELERATOR", "cpu")
BACKEND = "nccl" if ACCELERATOR == "gpu" else "gloo"
DEVICE = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if ACCELERATOR == "gpu" else "cpu")


# Trainers and their process groups: gloo now and then aborts a process in which a group is collected.
KEPT: list[list[Run]] = []


def own_cross_entropy(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss outside of the model's forward, when a sharded root may have given its parameters back."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def labels(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


class Module(Plain):
    """Built at once, for DDP."""

    def __init__(self, loss: Callable[..., Tensor], kind: str) -> None:
        super().__init__(causal_lm(kind))
        self.loss = loss
        self.val_losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.model, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_losses.append(float(self.loss(self.model, batch)))


class OwnDecoder(Module):
    """A decoder in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__(labels, "qwen2")
        torch.manual_seed(4)
        self.model = Masked()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["input_ids"], batch["attention_mask"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_losses.append(float(self.training_step(batch, batch_idx)))


class Unused(Module):
    """One parameter never takes part."""

    def __init__(self, loss: Callable[..., Tensor], kind: str) -> None:
        super().__init__(loss, kind)
        torch.manual_seed(4)
        self.spare = torch.nn.Linear(3, 3)


class Sharded(Module):
    """Sharded by its author: blocks first, then the model."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def _data() -> DataLoader[Any]:
    rows: Any = documents(16, seed=2)
    sampler: Any = DistributedSampler(rows, 2, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(rows, batch_size=2, collate_fn=collate, sampler=sampler)


def _whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    a, b = _whole(a), _whole(b)
    assert a.keys() == b.keys()
    norm = sum(float(t.double().norm() ** 2) for t in b.values()) ** 0.5
    return max(float((a[n].double() - b[n].double()).norm()) for n in b) / norm


def compare(name: str, make: Callable[[], Any], strategy: Callable[[], Any], **options: Any) -> None:
    runs: list[Run] = []
    KEPT.append(runs)
    modules = []
    for ours in (None, LigerCallback(verbose=False)):
        modules.append(make())
        sanity = {"num_sanity_val_steps": 1, "limit_val_batches": 2, "val_check_interval": 2}
        given = {
            "accelerator": ACCELERATOR,
            "devices": 2,
            "strategy": strategy(),
            "use_distributed_sampler": False,
            **sanity,
            **options,
        }
        runs.append(fit(modules[-1], _data(), ours, val=_data(), log_every_n_steps=2, **given))
    plain, mine = runs
    assert len(plain.losses) == 4
    worst = max(abs(a - b) / a for a, b in zip(plain.losses, mine.losses, strict=True))
    gradient = max(_distance(b, a) for a, b in zip(plain.gradients, mine.gradients, strict=True))
    parameter = _distance(mine.parameters, plain.parameters)
    validation = max(abs(a - b) / a for a, b in zip(modules[0].val_losses, modules[1].val_losses, strict=True))
    assert_engaged(mine)
    found = f"loss {worst:.1e} gradient {gradient:.1e} parameter {parameter:.1e} validation {validation:.1e}"
    assert worst <= 1e-5 and gradient <= 2e-5 and parameter <= 1e-5 and validation <= 1e-5, f"{name}: {found}"
    check_sums(mine)
    check_proof(name, mine)
    if dist.get_rank() == 0:
        print(f"{name}: {found}", flush=True)


def check_proof(name: str, run: Run) -> None:
    """Every rank has compared its own batch, or says why none has."""
    found = run.report["proof"]["equivalence"]
    assert not found["mismatch"], found
    assert found["agreement"] is not None and found["agreement"]["gradient_difference"] < 5e-6, found
    assert run.report["proof"]["kernels"]["step"] == 1 and not run.report["proof"]["kernels"]["missing"], run.report


def check_sums(run: Run) -> None:
    """The rate is the sum over ranks of what each rank saw, and the same on every rank."""
    seen = [torch.zeros(2, dtype=torch.float64, device=DEVICE) for _ in range(2)]
    trained = [int(b["attention_mask"].sum()) for b in _data()]
    rate = run.report["metrics"]["liger/tokens_per_second"]
    mine = torch.tensor([sum(trained), rate], dtype=torch.float64, device=DEVICE)
    dist.all_gather(seen, mine)
    assert seen[0][0] != seen[1][0], "the ranks must hold different tokens, or a sum cannot be told from a multiple"
    assert seen[0][1] == seen[1][1] > 0
    assert run.metrics["liger/tokens_per_second"] > 0
    meter = run.report["metrics"]
    whole = sum(float(s[0]) for s in seen)
    positions = torch.tensor([float(sum(b["input_ids"].numel() for b in _data()))], device=DEVICE)
    dist.all_reduce(positions)
    ranks = run.report["meter"]["ranks"]
    assert len(ranks) == 2 and sum(r["tokens_per_second"] for r in ranks) >= 0.99 * rate
    # a mean over two ranks, and what the busier one has above it
    assert 0 < meter["liger/rank_imbalance"] < 1 and 0 < meter["liger/mfu"] <= meter["liger/hfu"]
    # both figures are sums over the ranks: their ratio tells a sum from an extrapolation
    assert abs(meter["liger/padding_fraction"] - (1 - whole / float(positions))) < 1e-6


def main(which: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if which == "ddp":
        for unused in (False, True):
            made: Any = Unused if unused else Module
            for loss in (labels, own_cross_entropy):
                compare(
                    f"ddp find_unused_parameters={unused} {loss.__name__}",
                    partial(made, loss, "qwen2"),
                    partial(DDPStrategy, process_group_backend=BACKEND, find_unused_parameters=unused),
                )
        compare("ddp plain decoder", OwnDecoder, lambda: DDPStrategy(process_group_backend=BACKEND))
        compare(
            "ddp accumulate and clip",
            lambda: Module(labels, "gpt2"),
            lambda: DDPStrategy(process_group_backend=BACKEND, static_graph=False),
            gradient_clip_val=0.1,
            accumulate_grad_batches=2,
            max_steps=2,
        )
    else:
        for kind in ("qwen2", "llama"):
            for loss in (labels, own_cross_entropy):
                compare(
                    f"model parallel {kind} {loss.__name__}",
                    partial(Sharded, loss, kind),
                    lambda: ModelParallelStrategy(
                        data_parallel_size=2, tensor_parallel_size=1, process_group_backend=BACKEND
                    ),
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
