"""Optimizer state in bf16 over shards: as on one process, resumed in every way, planned, and refused where it must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_tools import KINDS, at, case, fit, plain, same, say, strategy
from resuming import DEVICE, WORLD, Hard, distance, mean_over_ranks, train, worst
from torch.distributed.tensor import DTensor

from lightning_liger import LigerCallback
from lightning_liger.kernels.device import interpreted
from lightning_liger.optim.adamw import fused_step_of
from lightning_liger.optim.places import local

BF16: dict[str, Any] = {"optimizer_state_dtype": "bf16"}
# what rounding of moments makes of eight steps of 1e-2, beside fp32 state
NEAR_LOSS, NEAR = 2e-3, 2e-3


def moments(run: Any) -> list[Any]:
    state = run.trainer.optimizers[0].state
    return [entry[name] for entry in state.values() for name in ("exp_avg", "exp_avg_sq")]


@case
def bf16_state_over_shards() -> None:
    """Weights stay fp32 in every rank's shards; clipping and accumulation are those of one process."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    expected = plain(Hard(), **options)
    found = fit(Hard(), strategy=BF16, **options)
    losses = worst(mean_over_ranks(found.losses), mean_over_ranks(expected.losses))
    weights = distance(found.parameters, expected.parameters)
    assert losses < NEAR_LOSS and weights < NEAR, (losses, weights)
    held = moments(found)
    assert held and {m.dtype for m in held} == {torch.bfloat16}
    assert any(isinstance(m, DTensor) for m in held)
    optimizer = found.trainer.optimizers[0]
    assert {p.dtype for p in optimizer.state} == {torch.float32}
    step = fused_step_of(optimizer)
    assert step is not None and step.kernel == (DEVICE.type == "cuda" or interpreted())
    callback = next(c for c in found.trainer.callbacks if isinstance(c, LigerCallback))
    plan = callback.report.memory
    ours = [local(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    assert plan["optimizer"] == 4 * sum(p.numel() for p in ours)
    assert plan["gradients"] == 4 * sum(p.numel() for p in ours) and plan["temporaries"] == 0
    say(f"bf16 state: loss {losses:.1e} weights {weights:.1e}; planned {plan['optimizer']} bytes of moments")


@case
def bf16_state_resumed() -> None:
    """As one file and as a directory; with the option and without; the moments that were saved are what is loaded."""
    for kind in KINDS:
        through = fit(Hard(), kind, f"bf16-{kind}", strategy=BF16)
        again = fit(Hard(), kind, strategy=BF16, ckpt_path=at(f"bf16-{kind}", 3))
        exact = same(again, through, 3)
        without = fit(Hard(), kind, f"fp32-{kind}", ckpt_path=at(f"bf16-{kind}", 3))
        assert {m.dtype for m in moments(without)} == {torch.float32}
        reverse = fit(Hard(), kind, strategy=BF16, ckpt_path=at(f"fp32-{kind}", 6))
        assert {m.dtype for m in moments(reverse)} == {torch.bfloat16}
        for run in (without, reverse):
            assert distance(run.parameters, through.parameters) < NEAR
        say(f"bf16 state {kind}: resumed {exact}; with and without the option within {NEAR}")
    saved = torch.load(at("bf16-full", 3), weights_only=True)["optimizer_states"][0]["state"]
    assert {entry["exp_avg"].dtype for entry in saved.values()} == {torch.bfloat16}
    assert all(float(entry["step"]) == 3.0 for entry in saved.values())
    alone = plain(Hard(), ckpt_path=at("bf16-full", 3))
    assert {m.dtype for m in moments(alone)} == {torch.float32}
    weights = distance(alone.parameters, through.parameters)
    assert weights < NEAR
    say(f"bf16 state of {WORLD} ranks goes on in plain Lightning: weights {weights:.1e}")


@case
def bf16_state_in_host_memory() -> None:
    if DEVICE.type == "cuda":
        found = fit(Hard(), strategy={**BF16, "offload": True}, max_epochs=1)
        assert {(m.dtype, local(m).device.type) for m in moments(found)} == {(torch.bfloat16, "cpu")}
        say("bf16 state in host memory")
    else:
        say("bf16 state in host memory: not without a GPU")


def differs_between_ranks(tensors: list[Any]) -> float:
    mine = torch.cat([local(t).double().flatten() for t in tensors])
    first = mine.clone()
    dist.broadcast(first, 0)
    found = (mine - first).abs().max()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


@case
def bf16_state_of_copies_is_rounded_alike() -> None:
    """Ranks that hold the same entries would drift apart by their noise."""
    runs = {
        "copies of liger_fsdp": fit(Hard(), strategy={**BF16, "replicate_size": WORLD}, gradient_clip_val=0.5),
        "DDP": train(
            Hard(),
            ranks=WORLD,
            strategy="ddp_find_unused_parameters_true",
            callbacks=[LigerCallback(verbose=False, **BF16)],
            gradient_clip_val=0.5,
        ),
    }
    for name, run in runs.items():
        assert {m.dtype for m in moments(run)} == {torch.bfloat16}
        optimizer = run.trainer.optimizers[0]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert differs_between_ranks(held) == 0.0 and differs_between_ranks(moments(run)) == 0.0, name
    apart = distance(*(run.parameters for run in runs.values()))
    assert apart < (1e-5 if DEVICE.type == "cpu" else 1e-4), apart  # the same noise in both
    say(f"bf16 state of copies: alike on all ranks; liger_fsdp beside DDP {apart:.1e}")


@case
def bf16_state_by_the_callbacks_option() -> None:
    callback = LigerCallback(verbose=False, **BF16)
    found = train(Hard(), ranks=WORLD, strategy=strategy(), callbacks=[callback], max_epochs=1)
    assert {m.dtype for m in moments(found)} == {torch.bfloat16} and callback.report.optimizer.applied == 1
    say("bf16 state by the callback's option")


@case
def bf16_state_of_others_is_refused() -> None:
    class Other(Hard):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), amsgrad=True)

    module = Other()
    with pytest.raises(ValueError, match=r"optimizer_state_dtype='bf16' is about AdamW, but AdamW\(amsgrad=True\)"):
        fit(module, strategy=BF16, max_epochs=1)
    assert module.trainer.global_step == 0
    say("bf16 state of other optimizers is refused before training")
