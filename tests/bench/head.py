"""Time and memory of the LM head with its loss: plain, Liger's FLCE called directly, and this package's backends.

    python tests/bench/head.py [--rows 2048 4096 16384] [--heads 896x151936 3584x152064]

Every variant computes loss and gradients for the same bf16 rows; medians of interleaved repetitions after warm-up.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.head.linear_cross_entropy import linear_cross_entropy


def variants() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def kept(rows: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        keep = (target != -100).nonzero()[:, 0]
        return rows[keep], target[keep]

    def ours(backend: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            chosen, labels = kept(rows, target)
            return linear_cross_entropy(chosen, weight, None, labels, backend=backend)

        return run

    return {
        "plain": lambda rows, weight, target: F.cross_entropy(F.linear(rows, weight).float(), target),
        "liger direct": lambda rows, weight, target: liger_fused_linear_cross_entropy(rows, weight, target),
        "ours/liger": ours("liger"),
        "ours/triton": ours("triton"),
        "ours/torch": ours("torch"),
    }


def measure(run: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median milliseconds and peak GB above what was allocated before."""
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), (torch.cuda.max_memory_allocated() - base) / 1e9


def compare(rows: Tensor, weight: Tensor, target: Tensor, repeats: int) -> dict[str, tuple[float, float, str]]:
    """Milliseconds, GB and loss of each variant."""
    found = {}
    for name, variant in variants().items():

        def step(variant: Callable[..., Tensor] = variant) -> None:
            rows.grad = weight.grad = None
            variant(rows, weight, target).backward()

        try:
            step()
            step()
            ms, gb = measure(step, repeats)
            found[name] = (ms, gb, f"{variant(rows, weight, target).item():.5f}")
        except torch.cuda.OutOfMemoryError:
            found[name] = (float("nan"), float("nan"), "out of memory")
        rows.grad = weight.grad = None
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 4096, 16384])
    parser.add_argument("--heads", nargs="+", default=["896x151936", "3584x152064"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(f"{'head':>12} {'rows':>6} {'labelled':>8}  {'variant':<14} {'ms':>8} {'GB':>7}  loss")
    for head in args.heads:
        hidden, vocab = map(int, head.split("x"))
        weight = (torch.randn(vocab, hidden, device="cuda") * 0.02).bfloat16().requires_grad_()
        for n in args.rows:
            rows = torch.randn(n, hidden, device="cuda").bfloat16().requires_grad_()
            for share in (1.0, 0.5):
                target = torch.randint(0, vocab, (n,), device="cuda")
                target[torch.rand(n, device="cuda") >= share] = -100
                for name, (ms, gb, loss) in compare(rows, weight, target, args.repeats).items():
                    print(f"{head:>12} {n:>6} {share:>8.0%}  {name:<14} {ms:>8.2f} {gb:>7.2f}  {loss}", flush=True)


if __name__ == "__main__":
    main()
