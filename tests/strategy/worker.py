"""Two processes, run by ``torchrun``: each case trained on one process and sharded over two, and compared.

Over gloo on CPUs, or over NCCL on two GPUs with ``TEST_ACCELERATOR=gpu``.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import modules
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from helpers import Recorder, Run
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_liger import LigerCallback, LigerFSDPStrategy, LigerFSDPStrategyPL

ACCELERATOR = os.environ.get("TEST_ACCELERATOR", "cpu")
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if ACCELERATOR == "gpu" else "cpu")
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
    "use_distributed_sampler": False,
}


def train(module: Any, ranks: int, strategy: Any, callbacks: list[Any], tree: Any = L, **options: Any) -> Run:
    run = Run()
    devices: Any = ranks if ranks > 1 or ACCELERATOR == "cpu" else [DEVICE.index]
    trainer = tree.Trainer(
        accelerator=ACCELERATOR,
        devices=devices,
        strategy=strategy,
        callbacks=[Recorder(run), *callbacks],
        **{**QUIET, **options},
    )
    data = modules.loader(RANK if ranks > 1 else 0, ranks)
    trainer.fit(module, data, modules.loader(RANK if ranks > 1 else 0, ranks))
    run.parameters = whole(dict(module.named_parameters()))
    run.trainer = trainer
    run.metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return run


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu() for n, t in tensors.items()}


def mean_over_ranks(values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(tensor)
    return (tensor / WORLD).tolist()


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    norm = sum(float(t.double().norm() ** 2) for t in b.values()) ** 0.5
    return max(float((a[n].double() - b[n].double()).norm()) for n in b) / norm


def compare(name: str, make: Callable[[], Any], *, tree: Any = L, strategy: Any = None, **options: Any) -> None:
    kind = LigerFSDPStrategy if tree is L else LigerFSDPStrategyPL
    one = train(make(), 1, "auto", [], tree, **options)
    start = whole(dict(make().named_parameters())) if name != "configure_model" else {}
    two = train(
        make(), WORLD, kind(**{"bf16": False, **(strategy or {})}), [LigerCallback(verbose=False)], tree, **options
    )
    losses = mean_over_ranks(two.losses)
    worst = max(abs(a - b) / abs(a) for a, b in zip(one.losses, losses, strict=True))
    parameter = distance(two.parameters, one.parameters)
    moved = distance(one.parameters, start) if start else 1.0
    found = f"loss {worst:.1e} parameter {parameter:.1e} (moved by {moved:.1e} in {len(losses)} steps)"
    assert worst <= 1e-5 and parameter <= 1e-5, f"{found}\n{one.losses}\n{losses}"
    assert moved > 1e-3, found
    say(f"{name}: {found}")


def say(text: str) -> None:
    if RANK == 0:
        print(f"ok {text}", flush=True)


CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def _same(name: str, make: Callable[[], Any], **options: Any) -> None:
    CASES[name] = lambda: compare(name, make, **options)


_same("in_init_tied", modules.InInit)
_same("in_init_untied", lambda: modules.InInit("llama"))
_same("in_setup", modules.InSetup, strategy={"reshard_after_forward": False})
_same("configure_model", modules.InConfigureModel)
_same("own_sharding", modules.OwnSharding)
_same("own_loss_through_self", modules.OwnLoss)
_same("adapters", modules.Adapters)
_same("manual_and_clipped", modules.Manual)
_same("accumulate_and_clip", modules.InInit, accumulate_grad_batches=4, gradient_clip_val=0.5)
_same("clip_by_value", modules.InInit, gradient_clip_val=0.002, gradient_clip_algorithm="value")
_same("policy_and_reference", modules.PolicyAndReference)
_same("on_the_module", modules.OnTheModule, gradient_clip_val=0.5)
_same("two_optimizers", modules.TwoOptimizers)
_same("is_the_model", modules.IsTheModel)
_same("is_the_model_manual", lambda: modules.IsTheModel(manual=True))
_same("no_blocks", lambda: modules.IsTheModel(blocks=1))
_same("no_blocks_manual", lambda: modules.IsTheModel(blocks=1, manual=True))
_same("one_linear_manual", modules.OneLinear)
_same("experts", modules.Experts)
_same("pytorch_lightning", modules.InInitPL, tree=pl)
_same("offload", modules.InInit, strategy={"offload": True})


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    failed = []
    for name in names or CASES:
        try:
            CASES[name]()
        except Exception:
            failed.append(name)
            if RANK == 0:
                print(f"FAILED {name}\n{''.join(traceback.format_exc().splitlines(True)[-9:])}", flush=True)
    dist.destroy_process_group()
    sys.exit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
