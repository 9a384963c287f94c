"""What to do with a comparison: the fastest options, and what stands in the way of more, with the measured numbers."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

from lightning_liger.bench.results import Comparison, Row
from lightning_liger.bench.schedule import INSIDE
from lightning_liger.bench.variants import options_of
from lightning_liger.settings import Settings

# A device that has caught up with the host when a turn ends, to so much of a step, was waiting for it.
_CAUGHT_UP = 0.1
# A share of padding below which there is little to remove, and a utilisation below which a GPU has room.
_LITTLE_PADDING = 0.1
_ROOM = 0.35
_SLOWER = 0.95

_WITHOUT = {
    "+bf16 policy": "keep the Trainer's own precision and strategy",
    "+kernels": "kernels=False",
    "+fused head": "fused_head=False, unless its memory is what lets a batch fit",
    "+padding-free": "padding_free=False",
    "+token batches": "leave max_tokens_per_batch out, or give another number",
    "+compile": "compile=False",
}


def advice(comparison: Comparison) -> list[str]:
    """Sentences; none where nothing was measured."""
    measured = [row for row in comparison.rows if row.measured and not row.variant.peer]
    if not measured:
        return []
    best = max(measured, key=lambda row: row.tokens_per_second or 1 / row.step_seconds)
    found = [] if comparison.order == INSIDE else _fastest(comparison, best) + _faster_peers(comparison, measured)
    found += _slower(comparison, measured)
    padding = comparison.plain.padding
    if padding is not None and padding < _LITTLE_PADDING and comparison.plain.measured:
        found.append(
            f"Only {padding:.0%} of the batches is padding, so that removing it gains little; the fused head and token batches "
            "are what is left."
        )
    return found + _waiting(comparison, best)


def _fastest(comparison: Comparison, best: Row) -> list[str]:
    if best is comparison.plain:
        return ["Plain is fastest here; see below what stands in the way."]
    ratio = comparison.speedup(best)
    gain = f", {ratio:.2f} times plain" if ratio is not None else ""
    strategy = f", strategy={best.variant.strategy!r}" if best.variant.strategy != "auto" else ""
    return [f"Fastest: {best.name}{gain}: Trainer(callbacks=[LigerCallback({_options(comparison, best)})]{strategy})."]


def _faster_peers(comparison: Comparison, ours: list[Row]) -> list[str]:
    """Peers that are faster than the fastest of ours on batches of the same kind."""
    found = []
    for row in (r for r in comparison.rows if r.variant.peer and r.measured):
        like = [r for r in ours if r.variant.same_batches == row.variant.same_batches]
        rate = row.tokens_per_second
        best = max((r.tokens_per_second or 0.0 for r in like), default=0.0)
        if rate is not None and rate > best > 0:
            found.append(f"{row.name} trains {rate / best:.2f} times the tokens per second of the fastest of ours.")
    return found


def _options(comparison: Comparison, best: Row) -> str:
    """What differs from the defaults; nothing about features that were not measured."""
    missing = {row.name for row in comparison.rows if not row.measured and not row.out_of_memory}
    asked = {row.name for row in comparison.rows}
    missing |= {name for name in _WITHOUT if name not in asked}
    left_out = {"verbose", "verify", "profile", "benchmark_steps"} | options_of(missing)
    defaults = {f.name: f.default for f in fields(Settings) if f.name not in left_out}
    return ", ".join(f"{k}={v!r}" for k, v in best.settings.items() if k in defaults and v != defaults[k])


def _slower(comparison: Comparison, measured: list[Row]) -> list[str]:
    """Features that cost more than they gain, in every round."""
    found = []
    for before, row in pairwise(measured):
        one, two = comparison.speedup_of_turns(before), comparison.speedup_of_turns(row)
        if len(row.turns) < 2:
            continue  # one round may have met anything
        if one is None or two is None or row.name not in _WITHOUT or two[1] >= _SLOWER * one[0]:
            continue
        share = two[1] / one[0]
        found.append(f"{row.name} is slower here than without it (at best {share:.2f} times): {_WITHOUT[row.name]}.")
    return found


def _waiting(comparison: Comparison, best: Row) -> list[str]:
    """A GPU that waits for the host, or has room."""
    lag = best.lag
    if lag is None:
        return []
    tokens = sum(sum(t.tokens or ()) for t in best.turns) / max(len(best.seconds), 1)
    mfu = comparison.mfu(best)
    used = f" at {mfu:.0%} MFU" if mfu is not None else ""
    more = f"max_tokens_per_batch={_rounded(4 * tokens)}" if tokens else "larger batches"
    if lag < _CAUGHT_UP:
        return [
            f"With {tokens:,.0f} tokens a step{used} the GPU waits for the host in {best.name}: launches, or values that the "
            f"step reads (.item(), printing). Give a step more work ({more}), or fewer launches (compile=True or "
            "'cudagraphs')."
        ]
    if mfu is not None and mfu < _ROOM:
        return [f"{best.name} runs {tokens:,.0f} tokens a step{used}: there is room for more of them ({more})."]
    return []


def _rounded(tokens: float) -> int:
    return max(round(tokens / 1024), 1) * 1024
