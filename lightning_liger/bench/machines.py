"""A comparison for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_liger.bench.results import Comparison, Row


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """For machines; bytes, seconds, and floating point operations per second."""
    return {
        "name": comparison.name,
        "device": comparison.device,
        "order": comparison.order,
        "plan": asdict(comparison.plan),
        "seconds": round(comparison.seconds, 1),
        "notes": list(comparison.notes),
        "problems": comparison.problems(),
        "variants": [_row(comparison, row) for row in comparison.rows],
    }


def _row(comparison: Comparison, row: Row) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": row.name,
        "options": {k: _plainly(v) for k, v in row.settings.items()},
        "skipped": row.variant.skipped,
        "peer": row.variant.peer,
        "meaning": row.variant.meaning,
        "failure": "" if row.variant.skipped else row.failure,
        "out_of_memory": row.out_of_memory,
    }
    if row.measured:
        even = row.smoothness
        made |= {
            "precision": row.precision,
            "step_seconds": row.step_seconds,
            "spread": row.spread,
            "seconds": row.seconds,
            "tokens_per_second": row.tokens_per_second,
            "tokens_per_step": row.tokens_per_step,
            "padding_fraction": row.padding,
            "speedup": comparison.speedup(row),
            "speedup_of_rounds": comparison.speedup_of_turns(row),
            "flops_per_second": row.flops_per_second,
            "peak_flops": row.peak_flops,
            "lag_steps": row.lag,
            "mfu": comparison.mfu(row),
            "peak_memory_bytes": row.peak_memory,
            "memory_ratio": comparison.memory_ratio(row),
            "largest_relative_loss_difference": comparison.deviation(row),
            "loss_noise": None if even is None else even.noise,
            "loss_spikes": None if even is None else even.spikes,
            "losses": row.losses(0),
            "reasons": list(row.reasons),
            "report": row.report,
        }
    return made


def _plainly(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, dict, type(None))) else repr(value)
