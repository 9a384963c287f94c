"""From a build function to a comparison of all that can run here."""

from __future__ import annotations

from collections.abc import Callable

from lightning_liger.bench.job import Build
from lightning_liger.bench.messages import Plan, Ready
from lightning_liger.bench.peers import variants as peer_variants
from lightning_liger.bench.results import Comparison
from lightning_liger.bench.schedule import Schedule
from lightning_liger.bench.variants import AS_PADDED, FEATURES, Variant, all_at_once, one_by_one


def measure(
    build: Build,
    *,
    name: str = "",
    plan: Plan | None = None,
    features: tuple[str, ...] | None = None,
    peers: tuple[str, ...] = (),
    budget: int | None = None,
    order: str | None = None,
    seconds: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Plain and one feature more at a time, and what others do with the same work, in processes of their own.

    Args:
        build: makes the job; importable, because other processes call it.
        name: of the comparison.
        plan: how each run goes.
        features: which to measure, of :data:`FEATURES`; None for all, and beside peers for all at once.
        peers: which to measure, of :data:`lightning_liger.bench.peers.PEERS`; the job needs a task.
        budget: tokens of the token batches, and of packed ones; as many as the largest padded batch has positions if left out.
        order, seconds, tell: see :class:`~lightning_liger.bench.schedule.Schedule`.
    """

    def variants(plain: Ready | None) -> list[Variant]:
        tokens: int | str = budget or AS_PADDED
        if peers and features is None:
            ours = all_at_once(not_here(plain), budget=tokens)
        else:
            ours = one_by_one(not_here(plain), chosen=FEATURES if features is None else features, budget=tokens)
        return [*ours, *peer_variants(peers, plain, tokens)]

    schedule = Schedule(build, variants, plan or Plan(), order, seconds, tell)
    schedule.result.name = name
    return schedule.run()


def not_here(plain: Ready | None) -> dict[str, str]:
    """Features that cannot be measured where the plain run ran, with the reason."""
    from lightning_liger.kernels.device import why_not

    found = {}
    if plain is not None and plain.kind != "cuda":
        found["bf16"] = f"on a {plain.kind.upper()} bf16 arithmetic is rarely faster"
        found["compile"] = "compiled layers are measured on CUDA devices"
    elif plain is not None and plain.precision == "bf16-true":
        found["bf16"] = "weights are bf16 already (precision='bf16-true')"
    if why := why_not():
        found["kernels"] = why
    return found
