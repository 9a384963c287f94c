"""Two processes, run by ``torchrun``: rank 0 times and decides, and both train as they would have without."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from typing import Any

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # before anything reads it

import torch
import torch.distributed as dist
from helpers import Plain, Run, causal_lm, collate, documents, fit, leave
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_liger import LigerCallback, LigerFSDPStrategy
from lightning_liger.tuning import blocks, candidates
from lightning_liger.tuning.decision import Plan

RANK = int(os.environ["RANK"])
KEPT: list[Run] = []
GRAPHS = [0]


def counting(module: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    GRAPHS[0] += 1
    return aot_eager(module, inputs)


def choose(*given: Any) -> Plan:
    assert RANK == 0, "only rank 0 decides"
    return Plan((), True)


def train(strategy: Any, compile_blocks: Any) -> tuple[Run, dict[str, Any]]:
    data = documents(16, 3)
    sampler: Any = DistributedSampler(data, 2, RANK, shuffle=False)  # type: ignore[arg-type]
    loader: Any = DataLoader(data, 2, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    callback = LigerCallback(verbose=False, verify="off", compile=compile_blocks)
    options = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    run = fit(Plain(causal_lm(num_hidden_layers=3), lr=0.05), loader, callback, **options)
    KEPT.append(run)
    return run, run.report["decoder_blocks"]


def compare(name: str, make: Any) -> None:
    usual, _ = train(make(), False)
    GRAPHS[0] = 0
    found, report = train(make(), "auto")
    assert report["applied"] == 3, report
    assert report["off"] == [], report
    assert report["decided"].startswith("compiled; ms per block: "), report
    # what rank 0 has compiled for its trial serves all of its blocks
    assert GRAPHS[0] == 1, GRAPHS
    worst = max(abs(a - b) / abs(b) for a, b in zip(found.losses, usual.losses, strict=True))
    assert worst <= 1e-5, (name, found.losses, usual.losses)
    for key, parameter in usual.parameters.items():
        ours = found.parameters[key]
        whole, other = (p.full_tensor() if isinstance(p, DTensor) else p for p in (parameter, ours))
        assert torch.allclose(whole, other, rtol=1e-4, atol=1e-6), (name, key)
    torch._dynamo.reset()
    if RANK == 0:
        print(f"{name}: {worst:.0e}", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    blocks.can_time = lambda device=None: True
    blocks._BACKEND = counting
    candidates.fastest = choose
    cases = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp": lambda: LigerFSDPStrategy(bf16=False),
        "fsdp full": lambda: LigerFSDPStrategy(bf16=False, activation_checkpointing="full"),
        "fsdp selective": lambda: LigerFSDPStrategy(bf16=False, activation_checkpointing="selective"),
    }
    for name in sys.argv[1:] or cases:
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
        compare(name, cases[name])
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
