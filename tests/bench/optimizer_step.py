"""Clipping, AdamW's step and zero_grad for the parameters of Qwen2.5: PyTorch's implementations beside the step of this package.

    python tests/bench/optimizer_step.py                                   # without a GPU: the host's time alone
    python tests/bench/optimizer_step.py --size 0.5b 7b 14b                # one GPU; 14b: the shards of one rank of two
    python tests/bench/optimizer_step.py --size 0.5b 7b --dtensor          # parameters as FSDP2 has them
    python tests/bench/optimizer_step.py --size 0.5b 7b --tune             # other cuts of this package's kernels

fp32 weights and gradients. *Host* is the time until the calls return, with the device idle before; *device* is between events
around them. ``--no-clip`` leaves clipping out. Bytes per second count what the step has to move: weights, gradients and both
moments once each way (gradients once), nothing for what an implementation reads again. Without a GPU parameters are tiny, and
the launches of this package's kernels are left out: about 20 us each.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.optim import AdamW

from lightning_liger.bench.gsm8k import SHAPES
from lightning_liger.optim.adamw import FusedStep
from lightning_liger.parallel.clipping import clip_grad_norm

VARIANTS: dict[str, dict[str, Any]] = {
    "torch, foreach": {"foreach": True},
    "torch, fused": {"fused": True},
    "ours, fp32 state": {"state": None},
    "ours, bf16 state": {"state": torch.bfloat16},
}
RANKS = {"14b": 2}
HOST_ONLY = [(8, 8)] * 169 + [(8,)] * 121  # as many matrices and vectors as 0.5b has


def shapes_of(size: str) -> list[tuple[int, ...]]:
    from transformers import AutoModelForCausalLM, Qwen2Config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPES[size]))
    ranks = RANKS.get(size, 1)
    return [(-(-p.shape[0] // ranks), *p.shape[1:]) for p in model.parameters()]


def made(shapes: list[tuple[int, ...]], device: str, mesh: Any) -> list[nn.Parameter]:
    tensors = [torch.empty(shape, device=device).normal_(std=0.02) for shape in shapes]
    if mesh is not None:
        tensors = [DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for t in tensors]
    return [nn.Parameter(t) for t in tensors]


def clipping(parameters: list[nn.Parameter], step: FusedStep | None, mesh: Any) -> Callable[[], Any]:
    if step is not None:
        return lambda: step.clip(1.0, leave_clipped=False)
    if mesh is not None:
        return lambda: clip_grad_norm(parameters, 1.0)
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)


def measure(variant: str, shapes: list[tuple[int, ...]], device: str, mesh: Any, clip: bool, steps: int) -> list[float]:
    """Medians in ms: host time of clipping, of the step, of zero_grad; device time of all."""
    options = dict(VARIANTS[variant])
    ours = "state" in options
    state = options.pop("state", None)
    parameters = made(shapes, device, mesh)
    gradients = [torch.full_like(p, 1e-3) for p in parameters]
    optimizer = AdamW(parameters, lr=1e-5, **options)
    step = FusedStep(optimizer, state, kernel=True) if ours else None
    clips = clipping(parameters, step, mesh) if clip else lambda: None
    calls = (clips, optimizer.step, optimizer.zero_grad)
    cuda = device == "cuda"
    rows: list[list[float]] = []
    for turn in range(steps + 3):
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        if cuda:
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        times = [time.perf_counter()]
        for call in calls:
            call()
            times.append(time.perf_counter())
        if cuda:
            events[1].record()
            torch.cuda.synchronize()
        device_time = events[0].elapsed_time(events[1]) if cuda else float("nan")
        if turn >= 3:
            rows.append([*(1e3 * (b - a) for a, b in itertools.pairwise(times)), device_time])
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def without_launches() -> None:
    """The host's part of the kernels' way, where no kernel can run."""
    from lightning_liger.optim import kernel

    kernel.adam = lambda *_, **__: None  # type: ignore[assignment]
    kernel.squares = lambda *_, **__: None  # type: ignore[assignment]


def lines(size: str, device: str, mesh: Any, clip: bool, steps: int) -> Iterator[str]:
    shapes = HOST_ONLY if size == "host" else shapes_of(size)
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    yield f"{size}: {len(shapes)} parameters, {numel / 1e9:.2f}e9 numbers{', DTensors' if mesh is not None else ''}"
    yield "| variant | host: clip | step | zero_grad | host ms | device ms | TB/s |"
    yield "|---|---|---|---|---|---|---|"
    for variant in VARIANTS:
        try:
            found = measure(variant, shapes, device, mesh, clip, steps)
        except torch.OutOfMemoryError:
            yield f"| {variant} | out of memory | | | | | |"
            continue
        finally:
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        moved = numel * (20 if variant.endswith("bf16 state") else 28)
        rate = f"{moved / found[3] / 1e9:.2f}" if device == "cuda" else "-"
        parts = " | ".join(f"{x:.2f}" for x in (*found[:3], sum(found[:3])))
        yield f"| {variant} | {parts} | {found[3]:.2f} | {rate} |"


def tuned(size: str, clip: bool, steps: int) -> Iterator[str]:
    """Device time of this package's step by the cut of its kernels."""
    from lightning_liger.optim import kernel

    yield f"{size}: device ms by entries of a chunk, entries at a time and warps, of fp32 state and of bf16 state"
    own = (kernel.CHUNK, kernel.BLOCK, kernel.WARPS)
    for chunk, block, warps in itertools.product((8192, 16384, 65536), (1024, 2048, 4096), (4, 8)):
        kernel.CHUNK, kernel.BLOCK, kernel.WARPS = chunk, block, warps
        found = [measure(v, shapes_of(size), "cuda", None, clip, steps)[3] for v in VARIANTS if v.startswith("ours")]
        mark = " (as it is)" if (chunk, block, warps) == own else ""
        yield f"{chunk:6d} {block:5d} {warps:2d}: {found[0]:8.2f} {found[1]:8.2f}{mark}"
    kernel.CHUNK, kernel.BLOCK, kernel.WARPS = own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="*", default=None, choices=[*SHAPES, "host"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtensor", action="store_true")
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--tune", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = None
    if given.dtensor:
        import torch.distributed as dist

        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(device, (1,))
    if device == "cpu":
        without_launches()
    for size in given.size or (["0.5b"] if device == "cuda" else ["host"]):
        clip, steps = not given.no_clip, given.steps
        for line in tuned(size, clip, steps) if given.tune else lines(size, device, mesh, clip, steps):
            print(line, flush=True)


if __name__ == "__main__":
    main()
