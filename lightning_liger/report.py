"""What was applied, what was not and why, and what it saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_liger.call_sites import call_site
from lightning_liger.calls import BackboneCalls, HeadCalls
from lightning_liger.compilation.report import BlocksReport
from lightning_liger.data.report import BatchingReport
from lightning_liger.kernels.report import KernelReport
from lightning_liger.optim.report import OptimizerReport
from lightning_liger.printing import table
from lightning_liger.proof.report import ProofReport
from lightning_liger.tiling.report import TilingReport

if TYPE_CHECKING:
    from lightning_liger.padding.layout import Layout
    from lightning_liger.parallel.audit import ShardingReport
    from lightning_liger.parallel.divisible import SequenceReport


NO_PADDING = "the batch has no padding"
# Ranks may evaluate different numbers of batches, and a padded run to fall back on would be a collective.
SHARDED_EVALUATION = "evaluation of a sharded model"


@dataclass
class Feature:
    """One feature: on how many modules it is, and why it is not on others."""

    title: str
    applied: int = 0
    found: int = 0
    detail: str = ""
    off: list[str] = field(default_factory=list)

    def name(self, kind: str) -> None:
        """Add ``kind`` to what :attr:`detail` lists."""
        kinds = set(self.detail.strip("()").split(", ")) - {""} | {kind}
        self.detail = f"({', '.join(sorted(kinds))})"

    def refuse(self, reason: str) -> None:
        if reason not in self.off:
            self.off.append(reason)

    def to_dict(self) -> dict[str, Any]:
        return {"applied": self.applied, "found": self.found, "detail": self.detail, "off": list(self.off)}


@dataclass
class PaddingReport(Feature):
    """Counters of padding removal; plain Python numbers, so that counting never waits for a device."""

    calls: int = 0
    packed_calls: int = 0
    padded_runs: int = 0
    positions: int = 0
    padding: int = 0
    tokens: int = 0
    filler: int = 0
    shapes: dict[tuple[int, int, int], int] = field(default_factory=dict)
    attention: dict[str, int] = field(default_factory=dict)
    log: BackboneCalls = field(default_factory=BackboneCalls, repr=False)
    _pending: int = 0

    def restart(self) -> None:
        """Count from zero; what is on, and the reasons for what is off, stay."""
        self.calls = self.packed_calls = self.padded_runs = 0
        self.positions = self.padding = self.tokens = self.filler = self._pending = 0
        self.attention.clear()
        self.shapes.clear()
        self.log.clear()

    def seen(self, shape: tuple[int, int], model: object = None) -> None:
        """A training or evaluation call of ``model`` with ``(B, S)`` positions."""
        self.calls += 1
        self.log.seen(shape, model)
        self._pending = shape[0] * shape[1]
        self.positions += self._pending
        self.tokens += self._pending

    def packed(self, layout: Layout, shaped: Layout | None = None) -> None:
        """A call ran without padding; ``shaped``: as the backbone saw it, lengthened or not."""
        self.packed_calls += 1
        self.real(layout.tokens)
        self.log.real(layout.lengths, executed=(shaped or layout).documents)
        if shaped is not None and shaped.filler:
            self.filler += shaped.size - shaped.tokens
            self.shapes[shaped.shape_key] = self.shapes.get(shaped.shape_key, 0) + 1

    def real(self, tokens: int, lengths: tuple[int, ...] | None = None) -> None:
        """How many positions of the call counted last are tokens; the rest is padding. Later calls say nothing new."""
        self.log.real(lengths)
        missing, self._pending = max(self._pending - tokens, 0), 0
        self.padding += missing
        self.tokens -= missing

    def attended(self, backend: str) -> None:
        """One attention layer of a packed call was computed by ``backend``."""
        self.attention[backend] = self.attention.get(backend, 0) + 1

    def left_padded(self, reason: str) -> None:
        # a batch without padding leaves nothing undone, and what switched_off() said is not said again
        if reason != NO_PADDING and not any(known.endswith(reason) for known in self.off):
            self.refuse(reason)

    def switched_off(self, name: str, reason: str, *, training: bool) -> None:
        self.refuse(f"{name} keeps its padding in {'training' if training else 'evaluation'}: {reason}")

    def ran_twice(self) -> None:
        self.padded_runs += 1

    @property
    def fraction(self) -> float:
        return self.padding / self.positions if self.positions else 0.0

    @property
    def filler_fraction(self) -> float:
        """Share of the tokens in lengthened calls that is filler."""
        total = sum(size * calls for (size, _, _), calls in self.shapes.items())
        return self.filler / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "calls": self.calls,
            "packed_calls": self.packed_calls,
            "extra_padded_runs": self.padded_runs,
            "tokens": self.tokens,
            "positions": self.positions,
            "padding_fraction": self.fraction,
            "attention": dict(self.attention),
            "shapes": len(self.shapes),
            "filler_fraction": self.filler_fraction,
        }


@dataclass
class HeadReport(Feature):
    """Counters of the fused head."""

    fused_calls: int = 0
    rows: int = 0
    computed_rows: int = 0
    materialised_by: dict[str, str] = field(default_factory=dict)
    log: HeadCalls = field(default_factory=HeadCalls, repr=False)

    def restart(self) -> None:
        """Count from zero; what is on, and the reasons for what is off, stay."""
        self.fused_calls = self.rows = self.computed_rows = 0
        self.log.clear()

    def scored(self, rows: int, computed: int, head: object = None) -> None:
        self.fused_calls += 1
        self.rows += rows
        self.computed_rows += computed
        self.log.add(head, computed, loss=True)

    def read(self, rows: int, head: object) -> None:
        """Logits of ``rows`` rows were computed for something that is not differentiated."""
        self.log.add(head, rows, loss=False)

    def materialised(self, operator: str, rows: int = 0, head: object = None) -> None:
        """Logits were computed in full for ``operator``; the first call site of each is kept."""
        self.log.add(head, rows, loss=False)
        if operator not in self.materialised_by:
            self.materialised_by[operator] = call_site()

    @property
    def skipped_fraction(self) -> float:
        return 1 - self.computed_rows / self.rows if self.rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "fused_calls": self.fused_calls,
            "rows": self.rows,
            "computed_rows": self.computed_rows,
            "skipped_fraction": self.skipped_fraction,
            "materialised_by": dict(self.materialised_by),
        }


@dataclass
class Report:
    """The whole of it; :meth:`to_dict` for machines, :meth:`rows` for people."""

    padding: PaddingReport = field(default_factory=lambda: PaddingReport("Padding removal"))
    head: HeadReport = field(default_factory=lambda: HeadReport("Fused LM head + loss"))
    kernels: KernelReport = field(default_factory=KernelReport)
    blocks: BlocksReport = field(default_factory=BlocksReport)
    optimizer: OptimizerReport = field(default_factory=OptimizerReport)
    tiling: TilingReport = field(default_factory=TilingReport)
    sharding: ShardingReport | None = None
    sequence: SequenceReport | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    batching: BatchingReport = field(default_factory=BatchingReport)
    proof: ProofReport = field(default_factory=ProofReport)
    notes: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    attribution: dict[str, Any] = field(default_factory=dict)
    meter: dict[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Report:
        return self

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def nothing_to_accelerate(self) -> bool:
        return self.padding.applied == 0 and self.head.applied == 0 and self.kernels.applied == 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "nothing_to_accelerate": self.nothing_to_accelerate,
            "padding_free": self.padding.to_dict(),
            "fused_head": self.head.to_dict(),
            "kernels": self.kernels.to_dict(),
            "decoder_blocks": self.blocks.to_dict(),
            "optimizer": self.optimizer.to_dict(),
            "tiled_mlp": self.tiling.to_dict(),
            "sharding": None if self.sharding is None else asdict(self.sharding),
            "sequence_parallel": None if self.sequence is None else asdict(self.sequence),
            "memory_plan": dict(self.memory),
            "token_batches": self.batching.to_dict(),
            "proof": self.proof.to_dict(),
            "notes": list(self.notes),
            "metrics": dict(self.metrics),
            "attribution": dict(self.attribution),
            "meter": dict(self.meter),
        }

    def begin_training(self) -> None:
        """From here on the counters are about training: the sanity check before it was not."""
        self.padding.restart()
        self.head.restart()
        self.kernels.restart()
        self.tiling.restart()
        self.proof = ProofReport()

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Whatever is counted inside this context is not."""
        forget = self.forgetting()
        try:
            yield
        finally:
            forget()

    def forgetting(self) -> Callable[[], None]:
        """A function that forgets whatever is counted between now and its call."""
        parts: list[Any] = [self.padding, self.head, self.tiling, *self.kernels.ops.values()]
        before = [{k: v.copy() if isinstance(v, (list, dict, set)) else v for k, v in vars(p).items()} for p in parts]

        def forget() -> None:
            for part, values in zip(parts, before, strict=True):
                vars(part).update(values)

        return forget

    def rows(self) -> list[tuple[str, str, str]]:
        """``(feature, applied to, what it did)`` for the table."""
        return [
            (self.padding.title, _where(self.padding, "backbone"), self._padding_did()),
            (self.head.title, _where(self.head, "head"), self._head_did()),
            *self.kernels.rows(),
            *self.blocks.rows(),
            *self.optimizer.rows(),
            *self.tiling.rows(),
            *(part.row() for part in (self.sharding, self.sequence) if part is not None),
            *self.batching.rows(),
            *self.proof.rows(),
        ]

    def _padding_did(self) -> str:
        padding = self.padding
        if not padding.positions:
            return "no tokens seen"
        if not padding.padding and not padding.packed_calls:
            return f"no padding among {padding.positions:,} positions"
        share = f"{padding.fraction:.0%} of {padding.positions:,} positions were padding"
        if not padding.packed_calls:
            return f"{share}; kept"
        some = "" if padding.packed_calls == padding.calls else f" in {padding.packed_calls} of {padding.calls} calls"
        by = f"; attention: {', '.join(sorted(padding.attention))}" if padding.attention else ""
        return f"{share}; removed{some}{by}{self._shapes()}"

    def _shapes(self) -> str:
        padding = self.padding
        if not padding.shapes:
            return ""
        number = len(padding.shapes)
        return f"; {number} shape{'' if number == 1 else 's'}, {padding.filler_fraction:.1%} filler"

    def _head_did(self) -> str:
        head = self.head
        if not head.rows:
            return "no loss was computed through it"
        return f"{head.computed_rows:,} of {head.rows:,} head rows computed ({head.skipped_fraction:.0%} skipped)"

    def reasons(self) -> list[str]:
        lines = [f"{f.title}: {reason}" for f in (self.padding, self.head) for reason in f.off]
        for operator, site in self.head.materialised_by.items():
            lines.append(f"{self.head.title}: logits computed in full for {operator} ({site})")
        if self.padding.padded_runs:
            lines.append(
                f"{self.padding.title}: {self.padding.padded_runs} of {self.padding.calls} calls ran a second time, "
                "padded, because padded positions were read"
            )
        return (
            lines
            + self.kernels.reasons()
            + self.blocks.reasons()
            + self.optimizer.reasons()
            + self.tiling.reasons()
            + self.batching.reasons()
            + self.proof.reasons()
            + self.notes
        )

    def render(self) -> str:
        """The table as text; drawn by rich where it is installed."""
        reasons = [f"  - {reason}" for reason in self.reasons()]
        if self.nothing_to_accelerate and self.sharding is None and not self.batching.rows():
            why = "see below" if reasons else "no transformers model and no language-model head was found"
            return "\n".join([f"lightning-liger: nothing to accelerate ({why}); everything runs as it is", *reasons])
        columns = ("feature", "applied to", "first training step")
        return "\n".join(["lightning-liger", table(columns, self.rows()), *reasons])


def _where(feature: Feature, unit: str) -> str:
    if not feature.found:
        return "off" if feature.off else "none found"
    text = f"{feature.applied} of {feature.found} {unit}{'' if feature.found == 1 else 's'}"
    return f"{text} {feature.detail}".rstrip()
