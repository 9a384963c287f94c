"""Where the time of the fused head goes on a device, and which sizes suit it.

    python tests/bench/head_parts.py [--heads 896x151936 3584x152064] [--rows 16384]

Three tables for each head: the parts of one chunk by how many rows it has (what a matrix product reaches depends on its
shape), the kernel of softmax and gradient by how it is cut, and the whole loss by the memory a chunk may have.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_liger.head import chunks, triton_cross_entropy
from lightning_liger.head.linear_cross_entropy import linear_cross_entropy
from lightning_liger.head.sums import add_product, product
from lightning_liger.head.triton_cross_entropy import cross_entropy_in_place, scale_in_place


def milliseconds(run: Callable[[], object], repeats: int = 5) -> float:
    run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def parts(weight: Tensor, counts: list[int]) -> None:
    """One chunk: its three products in TFLOP/s, and what is done besides in GB/s and microseconds per 1,000 rows."""
    vocab, hidden = weight.shape
    print(f"\nparts of one chunk, {hidden} x {vocab}: TFLOP/s of products, ms for 16,384 rows in all")
    print(
        f"{'rows':>6} {'logits':>8} {'d_rows':>8} {'dW bf16':>8} {'dW fp32':>8} {'dW += ':>8} {'kernel':>8} {'sum ms':>8}"
    )
    total = torch.zeros(vocab, hidden, device="cuda")
    for n in counts:
        print(one_chunk(n, weight, total), flush=True)
    gradient = torch.zeros(vocab, hidden, device="cuda", dtype=torch.bfloat16)
    one = torch.ones((), device="cuda")
    print(
        f"fp32 -> bf16 {milliseconds(lambda: total.to(torch.bfloat16)):.3f} ms, zeros "
        f"{milliseconds(lambda: torch.zeros_like(total)):.3f} ms, times 1 in place "
        f"{milliseconds(lambda: scale_in_place(gradient, one)):.3f} ms, times 1 out of place "
        f"{milliseconds(lambda: gradient * one):.3f} ms"
    )


def one_chunk(n: int, weight: Tensor, total: Tensor) -> str:
    vocab, hidden = weight.shape
    h = torch.randn(n, hidden, device="cuda").bfloat16()
    z = torch.empty(n, vocab, device="cuda", dtype=torch.bfloat16)
    d_rows = torch.empty_like(h)
    target = torch.randint(0, vocab, (n,), device="cuda")
    times = [
        milliseconds(lambda: torch.mm(h, weight.T, out=z)),
        milliseconds(lambda: torch.mm(z, weight, out=d_rows)),
        milliseconds(lambda: product(z, h, torch.bfloat16)),
        milliseconds(lambda: product(z, h, torch.float32)),
        milliseconds(lambda: add_product(total, z, h)),
        milliseconds(lambda: cross_entropy_in_place(z, target, row_scale=1 / n)),
    ]
    rates = [2 * n * hidden * vocab / t / 1e9 for t in times[:5]]
    speed = 3 * z.numel() * 2 / times[5] / 1e6
    whole = (times[0] + times[1] + times[4] + times[5]) * 16384 / n
    return f"{n:>6} " + " ".join(f"{r:>8.0f}" for r in rates) + f" {speed:>6.0f}GB {whole:>8.2f}"


def kernels(vocab: int, n: int = 4096) -> None:
    """The kernel alone: two reads and a write of the chunk."""
    z = torch.randn(n, vocab, device="cuda").bfloat16()
    target = torch.randint(0, vocab, (n,), device="cuda")
    before = triton_cross_entropy._BLOCK, triton_cross_entropy._WARPS
    print(f"\nkernel, {n} x {vocab}: GB/s if nothing came from the cache")
    sizes = itertools.product((2048, 4096, 8192, 16384, 32768), (4, 8, 16, 32))
    for block, warps in ((b, w) for b, w in sizes if 8 <= b // (32 * w) <= 32):
        triton_cross_entropy._BLOCK, triton_cross_entropy._WARPS = block, warps
        ms = milliseconds(lambda: cross_entropy_in_place(z, target, row_scale=1 / n))
        print(
            f"{block:>6} entries {warps:>3} warps {ms:>7.3f} ms {3 * z.numel() * 2 / ms / 1e6:>6.0f} GB/s", flush=True
        )
    triton_cross_entropy._BLOCK, triton_cross_entropy._WARPS = before


def budgets(weight: Tensor, n: int) -> None:
    """The whole loss with its backward by the budget of a chunk."""
    vocab, hidden = weight.shape
    weight = weight.requires_grad_()
    rows = torch.randn(n, hidden, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(0, vocab, (n,), device="cuda")
    print(f"\nwhole loss, {hidden} x {vocab}, {n} rows, by the budget of a chunk")
    before = chunks._IN_PLACE["cuda"]

    def step() -> None:
        linear_cross_entropy(rows, weight, None, target, backend="triton").backward()
        rows.grad = weight.grad = None

    for budget in (0.5, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0):
        chunks._IN_PLACE["cuda"] = budget
        cut = chunks.row_chunks(n, vocab, rows.device, 2, in_place=True, spared=weight.numel() * 2)
        step()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ms = milliseconds(step)
        peak = (torch.cuda.max_memory_allocated() - base) / 1e9
        print(
            f"{budget:>5} GiB: {len(cut):>3} chunks of {cut[0].stop:>6} rows {ms:>8.2f} ms {peak:>6.2f} GB", flush=True
        )
    chunks._IN_PLACE["cuda"] = before
    weight.requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=["896x151936", "3584x152064"])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 2048, 3533, 4096, 5504, 8192, 16384])
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192, 16384])
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    for head in args.heads:
        hidden, vocab = map(int, head.split("x"))
        weight = (torch.randn(vocab, hidden, device="cuda") * 0.02).bfloat16()
        parts(weight, args.chunks)
        for n in args.rows:
            budgets(weight, n)
        del weight
        torch.cuda.empty_cache()
    kernels(int(args.heads[0].split("x")[1]))


if __name__ == "__main__":
    main()
