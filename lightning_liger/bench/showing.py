"""The comparison for people: a table, and a footer that explains every column of it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from lightning_liger.bench.advice import advice
from lightning_liger.bench.results import Comparison, Row
from lightning_liger.bench.schedule import INSIDE
from lightning_liger.printing import table

_WIDTH = 100
_EMPTY = "–"
_SHOWN_LOSSES = 24


@dataclass(frozen=True)
class _Column:
    title: str
    meaning: str
    cell: Callable[[Comparison, Row], str]


def show(comparison: Comparison) -> str:
    """Table, footer and notes as text."""
    columns = [c for c in _COLUMNS if any(c.cell(comparison, row) not in ("", _EMPTY) for row in comparison.rows)]
    rows = [[row.name, *(c.cell(comparison, row) for c in columns)] for row in comparison.rows if not _skipped(row)]
    parts = [
        _title(comparison),
        table(["variant", *(c.title for c in columns)], rows, numbers=True),
        "",
        *_wrapped("A variant with a + has all that ours above it have." if _cumulative(comparison) else ""),
        *(_entry(row.name, row.variant.meaning) for row in comparison.rows if not _skipped(row)),
        "",
        *(_entry(c.title, c.meaning) for c in columns),
        "",
        *_wrapped(_how(comparison)),
    ]
    notes = [*_notes(comparison), *comparison.notes]
    for heading, lines in (("What to do with it:", advice(comparison)), ("Notes:", notes)):
        if lines:
            parts += ["", heading, *(line for text in lines for line in _wrapped(text, first="  - ", rest="    "))]
    return "\n".join(parts)


def losses(comparison: Comparison) -> str:
    """The loss of each step, of all variants that saw the same batches; of some steps where there are many."""
    shown = [row for row in comparison.rows if row.measured and row.variant.same_batches]
    if not shown:
        return "No variant came as far as a loss."
    count = min(len(row.losses(0)) for row in shown)
    every = -(-count // _SHOWN_LOSSES)
    steps = [step for step in range(count) if step % every == 0 or step == count - 1]
    title = "Loss per step, on the same batches" if every == 1 else f"Loss at every {every}th step, on the same batches"
    rows = [[str(step + 1), *(f"{row.losses(0)[step]:.6f}" for row in shown)] for step in steps]
    return f"{title}\n{table(['step', *(row.name for row in shown)], rows, numbers=True)}"


def _title(comparison: Comparison) -> str:
    plain = comparison.plain
    padding = f"; {plain.padding:.0%} of plain's batches is padding" if plain.padding is not None else ""
    precision = f", precision {plain.precision}" if plain.precision else ""
    return f"{comparison.name or 'Result'}: {comparison.device or 'no device'}{precision}{padding}"


def _cumulative(comparison: Comparison) -> bool:
    return any(row.name.startswith("+") for row in comparison.rows)


def _skipped(row: Row) -> bool:
    """Whether it has no row; a peer has one all the same."""
    return bool(row.variant.skipped) and not row.variant.peer


def _how(comparison: Comparison) -> str:
    plan = comparison.plan
    rounds = max((len(row.turns) for row in comparison.rows), default=0)
    if comparison.order == INSIDE:
        return (
            f"Measured inside of this training, on its first batch: forward and backward, {rounds} times each in turns, after "
            "one to warm up. No optimizer stepped; weights, random numbers and the order of data are as before."
        )
    how = {
        "side by side": "each in a process of its own, in turns",
        "one after the other": "one after the other, each round from the start and with the memory given back in between",
    }.get(comparison.order, comparison.order)
    warm = f"the first {plan.warmup} {'is' if plan.warmup == 1 else 'are'} warm-up and not measured"
    return (
        f"Measured {how}: {rounds} {'round' if rounds == 1 else 'rounds'} of {plan.steps} optimizer steps; {warm}. "
        "All variants begin with the same weights and the same order of data."
    )


def _notes(comparison: Comparison) -> list[str]:
    """What a row cannot say in a number."""
    found = [f"{row.name} is not measured: {row.variant.skipped}." for row in comparison.rows if row.variant.skipped]
    for row in comparison.rows:
        if row.out_of_memory:
            found.append(f"{row.name}: a batch did not fit into memory; the other variants went on without it.")
        elif row.failure and not row.variant.skipped:
            found.append(f"{row.name}: {row.failure}")
    # the rows above have features off on purpose, and would say so
    last = next((row for row in comparison.rows[::-1] if row.measured and not row.variant.peer), None)
    if last is not None:
        found += [f"{last.name}: {reason}" for reason in last.reasons]
    return found


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest)


def _entry(name: str, meaning: str) -> str:
    return "\n".join(_wrapped(f"{name.ljust(16)} {meaning}", first="  ", rest=" " * 19))


# -- cells -------------------------------------------------------------------------------------------------------------


def _step(comparison: Comparison, row: Row) -> str:
    if row.variant.skipped:
        return "not here"
    if row.failure:
        return "out of memory" if row.out_of_memory else "failed"
    return f"{1000 * row.step_seconds:,.1f} ms ± {row.spread:.0%}" if row.measured else _EMPTY


def _tokens(comparison: Comparison, row: Row) -> str:
    rate = row.tokens_per_second if row.measured else None
    return _EMPTY if rate is None else f"{rate:,.0f}"


def _tokens_of_step(comparison: Comparison, row: Row) -> str:
    return _EMPTY if row.tokens_per_step is None else f"{row.tokens_per_step:,.0f}"


def _speedup(comparison: Comparison, row: Row) -> str:
    ratio = comparison.speedup(row)
    if ratio is None:
        return _EMPTY
    turns = comparison.speedup_of_turns(row)
    if row is comparison.plain or turns is None or f"{turns[0]:.2f}" == f"{turns[1]:.2f}":
        return f"{ratio:.2f}×"
    return f"{ratio:.2f}× ({turns[0]:.2f}–{turns[1]:.2f})"


def _mfu(comparison: Comparison, row: Row) -> str:
    share = comparison.mfu(row)
    return _EMPTY if share is None else f"{share:.1%}"


def _memory(comparison: Comparison, row: Row) -> str:
    if not row.measured or not row.peak_memory:
        return _EMPTY
    ratio = None if row is comparison.plain else comparison.memory_ratio(row)
    return gigabytes(row.peak_memory) + ("" if ratio is None else f" ({ratio:.2f}×)")


def _deviation(comparison: Comparison, row: Row) -> str:
    if row is comparison.plain or not row.measured:
        return _EMPTY
    if comparison.base(row) is None:
        return "own batches" if row.variant.own_batches else "other batches"
    deviation = comparison.deviation(row)
    if deviation is None:
        return _EMPTY
    within = deviation <= comparison.tolerance(row)
    return f"{relative(deviation)} {'equal' if within else 'DIFFERS'}"


def _noise(comparison: Comparison, row: Row) -> str:
    even = row.smoothness if row.measured else None
    return _EMPTY if even is None else f"{even.noise:.3f}, {even.spikes}"


def relative(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


_COLUMNS = (
    _Column(
        "step",
        "time of one step: the median, ± half of the middle half's width",
        _step,
    ),
    _Column("tokens/step", "real tokens in one step, on average", _tokens_of_step),
    _Column("tokens/s", "real tokens trained per second in the median step; padding does not count", _tokens),
    _Column(
        "speed",
        "how many times as fast as plain: step against step with the same batch, or tokens/s against tokens/s where "
        "batches differ; in brackets the slowest and the fastest round",
        _speedup,
    ),
    _Column(
        "MFU",
        "share of the device's peak arithmetic that goes into the model's own work on real tokens (50% is very good)",
        _mfu,
    ),
    _Column(
        "peak memory",
        "the most that training held at once, and its ratio to plain's (on a CPU: above the process before training)",
        _memory,
    ),
    _Column(
        "loss vs plain",
        "the largest relative difference of any step's loss from plain's on the same batches (or from the first variant's "
        "with these batches); 'equal' is within rounding (1e-5 in fp32, 8e-3 in bf16)",
        _deviation,
    ),
    _Column(
        "loss noise",
        "how much the loss jumps from step to step (standard deviation), and how many jumps stand out",
        _noise,
    ),
)
