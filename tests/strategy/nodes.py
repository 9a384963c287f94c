"""Eight processes as two nodes of four: whole copies in each node, shards within, and data that differs everywhere."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_liger import LigerCallback, LigerFSDPStrategy

RANK, WORLD, PER_NODE = int(os.environ["RANK"]), 8, 4
ROWS, STEPS = 48, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Module(L.LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        self.seen += x[:, 0].tolist()
        y = x
        for block in self.blocks:
            y = block(y)
        return (self.out(y) * self.scale - x.sum(-1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def data() -> Any:
    return TensorDataset(torch.rand(ROWS, 6, generator=torch.Generator().manual_seed(3)))


def fit(module: Any, loader: Any, **options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, gradient_clip_val=0.5, **quiet, **options)
    trainer.fit(module, loader)
    return trainer


def reference(order: list[list[float]]) -> dict[str, Tensor]:
    """One process on the same global batches."""
    rows = {float(row[0]): row for (row,) in data()}
    steps = [torch.stack([rows[x] for own in order for x in own[i * 2 : i * 2 + 2]]) for i in range(STEPS)]
    module = Module(seed=7)
    loader = DataLoader(TensorDataset(torch.cat(steps)), batch_size=2 * WORLD)
    fit(module, loader, devices=1)
    return {n: p.detach() for n, p in module.named_parameters()}


def check(name: str, strategy: Any, copies: int) -> None:
    module = Module(seed=7 + RANK)  # rank 0 has the seed that the reference has
    callback = LigerCallback(verbose=False)
    trainer = fit(
        module, DataLoader(data(), batch_size=2), strategy=strategy, devices=PER_NODE, num_nodes=2, callbacks=[callback]
    )
    sharding = callback.report.sharding
    assert sharding is not None and (sharding.copies, sharding.ranks) == (copies, WORLD // copies), sharding
    weight: Any = module.blocks[0].inner.weight
    assert isinstance(weight, DTensor)
    if copies == 2:
        mesh = weight.device_mesh
        assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and mesh.mesh_dim_names == ("replicate", "shard")
    assert trainer.strategy.device_mesh["data_parallel"].size() == WORLD
    order: list[Any] = [None] * WORLD
    dist.all_gather_object(order, module.seen)
    assert len({x for own in order for x in own}) == ROWS, "every row is seen once, by one rank"
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in module.named_parameters()}
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, {n: p.detach() for n, p in whole.items()})
    assert all(torch.equal(other[n], p) for other in everyone for n, p in everyone[0].items()), "copies diverged"
    if RANK == 0:
        for n, expected in reference(order).items():
            torch.testing.assert_close(everyone[0][n], expected, rtol=1e-5, atol=1e-6)
        print(f"ok {name}", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    check("liger_fsdp", LigerFSDPStrategy(bf16=False), 1)
    check("liger_hsdp", LigerFSDPStrategy(replicate_size="nodes", bf16=False), 2)
    check("four copies", LigerFSDPStrategy(replicate_size=4, bf16=False), 4)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
