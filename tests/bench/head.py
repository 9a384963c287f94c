"""Time and memory of the LM head with its loss: plain, Liger's FLCE and cut-cross-entropy called directly, and ours.

    python tests/bench/head.py [--json FILE] [--shapes 896x151936:2048,4096,16384 3584x152064:16384,65536]

Every variant computes loss and gradients of the same bf16 rows and weight; medians after warm-up. Memory is the peak
above what was there before; "logits" is that without the two gradients, which every variant gives back. Where memory
runs out the row says so. Which kernel and chunk sizes are best on a device is what ``head_parts.py`` measures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.head.linear_cross_entropy import linear_cross_entropy
from lightning_liger.head.rows import take_rows

DEFAULT = ["896x151936:2048,4096,16384", "3584x152064:2048,4096,16384,65536"]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # rows, weight, target, positions that count


def variants() -> dict[str, Loss]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def ours(backend: str) -> Loss:
        # which rows count is known before: the package reads it from the CPU's copy of the labels
        return lambda rows, weight, target, keep: linear_cross_entropy(
            take_rows(rows, keep), weight, None, target[keep], backend=backend
        )

    found: dict[str, Loss] = {
        "plain": lambda rows, weight, target, keep: F.cross_entropy(F.linear(rows, weight).float(), target),
        "liger": lambda rows, weight, target, keep: liger_fused_linear_cross_entropy(rows, weight, target),
        "ours": ours("triton"),
        "ours/torch": ours("torch"),
    }
    try:
        from cut_cross_entropy import linear_cross_entropy as cce
    except ImportError:
        return found
    found["cce"] = lambda rows, weight, target, keep: cce(rows, weight, target)
    # without leaving out small gradients
    found["cce/exact"] = lambda rows, weight, target, keep: cce(rows, weight, target, filter_eps=None)
    return found


@dataclass
class Row:
    """One measurement. Times in milliseconds, memory in GB of 1e9 bytes."""

    hidden: int
    vocab: int
    rows: int
    labelled: float
    variant: str
    ms: float | None = None
    fastest_ms: float | None = None
    peak_gb: float | None = None
    logits_gb: float | None = None
    loss: float | None = None
    failed: str = ""


def measure(row: Row, step: Callable[[], Tensor], gradients: int, repeats: int) -> None:
    step()
    began = time.perf_counter()
    row.loss = round(step().item(), 5)
    repeats = min(repeats, max(3, int(1.0 / (time.perf_counter() - began))))
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() - base
    row.ms, row.fastest_ms = round(statistics.median(times), 3), round(min(times), 3)
    row.peak_gb, row.logits_gb = round(peak / 1e9, 3), round((peak - gradients) / 1e9, 3)


def bench(hidden: int, vocab: int, counts: list[int], wanted: list[str], repeats: int) -> list[Row]:
    weight = (torch.randn(vocab, hidden, device="cuda") * 0.02).bfloat16().requires_grad_()
    found: list[Row] = []
    for n, share in itertools.product(counts, (1.0, 0.5)):
        rows = torch.randn(n, hidden, device="cuda").bfloat16().requires_grad_()
        target = torch.randint(0, vocab, (n,), device="cuda")
        target[torch.randperm(n, device="cuda")[: n - int(n * share)]] = -100
        for name, loss in variants().items():
            if name in wanted:
                found.append(one(Row(hidden, vocab, n, share, name), loss, rows, weight, target, repeats))
                print(line(found[-1], found), flush=True)
    return found


def one(row: Row, loss: Loss, rows: Tensor, weight: Tensor, target: Tensor, repeats: int) -> Row:
    keep = (target != -100).nonzero()[:, 0]

    def step() -> Tensor:
        made = loss(rows, weight, target, keep)
        made.backward()
        rows.grad = weight.grad = None
        return made.detach()

    try:
        measure(row, step, (rows.numel() + weight.numel()) * 2, repeats)
    except torch.cuda.OutOfMemoryError:
        row.failed = "out of memory"
    except Exception as error:  # a foreign package that does not run here
        row.failed = f"{type(error).__name__}: {error}"[:200]
    rows.grad = weight.grad = None
    torch.cuda.empty_cache()
    return row


def line(row: Row, found: list[Row]) -> str:
    place = f"{row.hidden:>5} x {row.vocab:<7} {row.rows:>6} {row.labelled:>5.0%}  {row.variant:<11}"
    if row.ms is None:
        return f"{place} {row.failed}"
    other = of(found, row, "liger")
    ratio = f"{row.ms / other.ms:>8.3f}" if other is not None and other.ms else f"{'–':>8}"
    return f"{place} {row.ms:>9.2f} {ratio} {row.peak_gb:>9.2f} {row.logits_gb:>9.2f}  {row.loss}"


def of(found: list[Row], row: Row, variant: str) -> Row | None:
    same = (
        r for r in found if (r.hidden, r.rows, r.labelled, r.variant) == (row.hidden, row.rows, row.labelled, variant)
    )
    return next(same, None)


def aims(found: list[Row]) -> list[str]:
    """What the head is meant to reach, and whether it does."""
    said = []
    for row in (r for r in found if r.variant == "ours" and r.ms is not None):
        plain, liger = of(found, row, "plain"), of(found, row, "liger")
        limit = {2048: 0.25, 4096: 0.25}.get(row.rows, 0.5) if row.hidden < 2048 else 0.9
        limit *= row.labelled
        place = f"{row.hidden} x {row.vocab}, {row.rows} rows, {row.labelled:.0%}"
        if liger is not None and liger.ms is not None and (row.hidden < 2048 or row.rows >= 16384):
            ratio = row.ms / liger.ms  # type: ignore[operator]
            said.append(f"{'yes' if ratio <= limit else 'NO':<4} {place}: {ratio:.3f} of Liger's time, at most {limit}")
        if row.hidden >= 2048 and row.rows >= 16384 and plain is not None:
            if plain.ms is None or plain.logits_gb is None:
                said.append(f"yes  {place}: plain runs {plain.failed}")
                continue
            time_ok, share = row.ms <= plain.ms, row.logits_gb / plain.logits_gb  # type: ignore[operator]
            said.append(f"{'yes' if time_ok else 'NO':<4} {place}: {row.ms / plain.ms:.3f} of plain's time")  # type: ignore[operator]
            said.append(
                f"{'yes' if share <= 0.1 else 'NO':<4} {place}: {share:.3f} of plain's logits memory, at most 0.1"
            )
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=DEFAULT, help="HIDDENxVOCAB:ROWS,ROWS,...")
    parser.add_argument("--variants", nargs="+", default=["plain", "liger", "cce", "cce/exact", "ours", "ours/torch"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(
        f"{'head':>15} {'rows':>6} {'lab.':>5}  {'variant':<11} {'ms':>9} {'/ liger':>8} {'peak GB':>9} {'logits':>9}  loss"
    )
    found: list[Row] = []
    for shape in args.shapes:
        head, counts = shape.split(":")
        hidden, vocab = map(int, head.split("x"))
        found += bench(hidden, vocab, [int(n) for n in counts.split(",")], args.variants, args.repeats)
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps([asdict(r) for r in found], indent=1))
    print("\n".join(["", *aims(found)]))


if __name__ == "__main__":
    main()
