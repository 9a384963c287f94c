"""One training step of a decoder in plain PyTorch, padded and without padding.

Usage: ``python tests/bench/decoder_step.py [--layers 12 --width 768 --heads 12 --batch 32 --longest 1024 --dtype bf16]``

A nanoGPT with random weights on rows of random length (mean a third of the longest), AdamW, median of the steps.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lightning_liger import Settings, accelerate


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, longest: int, vocabulary: int = 50304) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def batches(count: int, rows: int, longest: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        lengths = (torch.rand(rows, generator=generator) ** 2 * (longest - 8)).long() + 8
        width = int(lengths.max())
        ids = torch.randint(1, 50257, (rows, width), generator=generator)
        real = torch.arange(width) < lengths[:, None]
        ids = ids.masked_fill(~real, 0)
        targets = ids.roll(-1, 1).masked_fill(~real.roll(-1, 1) | (torch.arange(width) == width - 1), -1)
        made.append((ids, targets))
    return made


def run(model: nn.Module, data: list[tuple[Tensor, Tensor]], device: str, handle: Any) -> tuple[float, float, float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device == "cuda")
    times, loss = [], torch.zeros(())
    for step, (ids, targets) in enumerate(data):
        if device == "cuda":
            torch.cuda.synchronize()
            if step == 3:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        moved = (ids.to(device, non_blocking=True), targets.to(device, non_blocking=True))
        if handle is not None:
            handle.book.pair((ids, targets), moved)
        loss = model(*moved)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    return statistics.median(times[3:]), float(loss.detach()), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 12, "width": 768, "heads": 12, "batch": 32, "longest": 1024, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = GPT(given.layers, given.width, given.heads, given.longest).to(
        device, torch.bfloat16 if given.dtype == "bf16" else torch.float32
    )
    data = batches(given.steps, given.batch, given.longest)
    share = 1 - sum(int((i != 0).sum()) for i, _ in data) / sum(i.numel() for i, _ in data)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {share:.0%} padding, {device}")
    for name, settings in (
        ("plain", None),
        ("fused head", Settings(padding_free=False)),
        ("fused head, no padding", Settings()),
    ):
        mine = copy.deepcopy(model)
        handle = None if settings is None else accelerate(mine, settings)
        seconds, loss, peak = run(mine, data, device, handle)
        print(f"{name:24s} {seconds * 1e3:8.1f} ms  peak {peak:6.2f} GB  last loss {loss:.5f}")
        if handle is not None:
            padding = handle.report.padding
            print(f"{'':24s} packed {padding.packed_calls} of {padding.calls} calls {padding.off}")
        del mine, handle


if __name__ == "__main__":
    main()
