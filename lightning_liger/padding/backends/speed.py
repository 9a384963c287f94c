"""What each backend is worth on this GPU: ``python -m lightning_liger.padding.backends.speed``.

Forward and backward of one layer over T tokens, causal, in TFLOP/s: 3.5 times the two matrix products of the forward,
counted inside of documents and below the diagonal only.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_liger.padding.backends.choice import proved
from lightning_liger.padding.backends.documents import by_torch
from lightning_liger.padding.backends.features import Features
from lightning_liger.padding.backends.registry import BACKENDS, Backend
from lightning_liger.padding.layout import Layout

SHAPES = ((14, 2, 64), (32, 8, 128))  # heads, key/value heads, head size: Qwen2.5 0.5B, and 7 to 8B models


def equal_documents(tokens: int, documents: int) -> Layout:
    number = torch.repeat_interleave(torch.arange(1, documents + 1), tokens // documents)
    return Layout.from_documents(number[None])


def flops(layout: Layout, features: Features) -> float:
    """Of forward and backward."""
    pairs = sum(length * (length + 1) / 2 for length in layout.lengths)
    return 3.5 * 4 * pairs * features.heads * features.head_size


def seconds(run: Callable[[], None], repeats: int) -> float:
    """Per run, after three to warm up."""
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats / 1e3


def measure(backend: Backend, layout: Layout, features: Features, repeats: int = 10) -> float:
    """TFLOP/s."""
    device = torch.device("cuda", torch.cuda.current_device())

    def draw(heads: int) -> Tensor:
        shape = (1, heads, layout.tokens, features.head_size)
        return torch.randn(shape, device=device, dtype=features.dtype).requires_grad_()

    q, k, v = draw(features.heads), draw(features.kv_heads), draw(features.kv_heads)
    grad = torch.randn(layout.tokens, features.heads, features.head_size, device=device, dtype=features.dtype)

    def run() -> None:
        if backend.run is None:
            out = by_torch(q, k, v, layout, features)
        else:
            out = backend.run(q, k, v, layout, features, None)
        torch.autograd.grad(out, (q, k, v), grad)

    return flops(layout, features) / seconds(run, repeats) / 1e12


def table(tokens: int, documents: Sequence[int]) -> str:
    """Markdown, one row for each backend and shape; what a backend cannot do is said in its row."""
    device = torch.device("cuda", torch.cuda.current_device())
    columns = ["backend", "heads", "head size", *(f"{n} × {tokens // n:,}" for n in documents), "proof"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for heads, groups, size in SHAPES:
        capability = torch.cuda.get_device_capability(device)
        features = Features("cuda", torch.bfloat16, size, size, heads, groups, capability=capability)
        for backend in BACKENDS:
            reason = backend.unavailable() or backend.cannot(features)
            started = time.perf_counter()
            reason = reason or proved(backend, features, device)
            took = f"{time.perf_counter() - started:.2f} s" if not reason else ""
            cells = [reason, *[""] * (len(documents) - 1)]
            if not reason:
                cells = [f"{measure(backend, equal_documents(tokens, n), features):.0f}" for n in documents]
            lines.append(f"| {' | '.join([backend.name, f'{heads}/{groups}', str(size), *cells, took])} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m lightning_liger.padding.backends.speed", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--documents", type=int, nargs="+", default=[32, 4, 1], help="how many of equal length")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no CUDA device here to measure on.", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, T = {given.tokens:,}")
    print(table(given.tokens, given.documents))
    return 0


if __name__ == "__main__":
    sys.exit(main())
