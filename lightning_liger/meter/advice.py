"""What would make a training faster, told from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightning_liger.meter.window import Sums

# Steps before anything is said: the first ones compile, warm up caches and start workers.
_ENOUGH = 20
_IDLE, _WAIT, _UNEVEN = 0.5, 0.1, 0.15


def advice(
    window: Sums, *, imbalance: float, budget: int, could_compile: Callable[[], bool], on_gpu: bool
) -> Iterator[str]:
    """Sentences, each with the numbers that it follows from; none for a training that is bound by its device.

    Args:
        window: of this rank. imbalance: of all ranks.
        budget: ``max_tokens_per_batch``; 0 without one.
        could_compile: layers could be compiled, and the user has not let them. Looks at all modules.
        on_gpu: steps were timed on a device that runs beside the host.
    """
    if window.timed < _ENOUGH:
        return
    seconds = window.measured
    tokens = window.tokens / window.batches if window.batches else 0.0
    if on_gpu and window.launches > _IDLE * window.timed:
        ways = [f"more tokens per batch (max_tokens_per_batch={_more(tokens, budget):,})"] if tokens else []
        ways += ["compiled layers (compile='auto')"] if could_compile() else []
        yield (
            f"the GPU waits for Python: in {window.launches:.0f} of {window.timed:.0f} steps it was done with backward "
            f"as soon as the last kernel was launched ({1000 * seconds / window.timed:.0f} ms per step for "
            f"{tokens:,.0f} tokens). What helps: {', '.join(ways) or 'a larger model or batch'}"
        )
    if seconds and window.data > _WAIT * seconds:
        yield (
            f"{window.data / seconds:.0%} of the time ({1000 * window.data / window.timed:.0f} ms per batch) goes into "
            "waiting for data. What helps: more workers (DataLoader(num_workers=...)), tokenizing beforehand"
        )
    if imbalance > _UNEVEN:
        keep = "the batches of one step are of unequal cost" if budget else "max_tokens_per_batch='keep_samples'"
        yield (
            f"the busiest rank has {imbalance:.0%} more to do than the average, and the others wait for it"
            + (f": {keep}" if budget else f". What helps: {keep}, which balances every step")
        )


def _more(tokens: float, budget: int) -> int:
    """Four times as many, as a power of two; launches cost the same however much each of them computes."""
    wanted = 4 * max(tokens, budget, 256)
    return int(2 ** max(int(wanted - 1).bit_length(), 10))
