"""The kernel proof: in one early step, what was asked for is seen to run, module by module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_liger.accelerate import Accelerated
from lightning_liger.hooks import TrainingHooks
from lightning_liger.kernels.device import interpreted
from lightning_liger.patching import inside_compiled
from lightning_liger.proof.profiled import Seen, is_profiling, keep_trace, profiler, read
from lightning_liger.proof.ranges import ModuleRanges
from lightning_liger.proof.ranks import everywhere
from lightning_liger.proof.report import KernelProofReport, ProofError
from lightning_liger.proof.requested import BLOCKS, Finding, Request, clean, inside_blocks, judge, requests

# The first steps compile and allocate: they say little about where a step's time goes.
_WARMUP = 2


class KernelProof(TrainingHooks):
    """Watches one training step.

    On a CUDA device the third step is recorded by ``torch.profiler``, and the kernels that were launched inside of a
    module must be those of its replacement. Elsewhere, and under Triton's interpreter, the first step's calls are
    counted.

    Args:
        accelerated: what was applied; asked for anew at the step, because modules may be born late.
        verify: ``"off"``, ``"warn"`` or ``"strict"``.
        directory: where the trace of the step is kept, with a range for every module; None keeps none.
        say: shows a text to the user, once the table was shown without it.
    """

    def __init__(
        self,
        accelerated: Callable[[], Accelerated],
        verify: str,
        directory: str | Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._accelerated = accelerated
        self._verify = verify
        self._directory = directory
        self._say = say
        self._batches = 0
        self._watching = False
        self._asked: list[Request] = []
        self._ranges: ModuleRanges | None = None
        self._recording: Any = None
        self._fused_calls = 0

    # -- the step that is watched --------------------------------------------------------------------------------

    def begin_batch(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self._batches += 1
        on_device = module.device.type == "cuda" and not interpreted()
        if self._batches != 1 + (_WARMUP if on_device or self._directory is not None else 0):
            return
        handle = self._accelerated()
        self._asked = requests(module, handle.bindings())
        self._fused_calls = handle.report.head.fused_calls
        profiled = (on_device or self._directory is not None) and not is_profiling()
        if is_profiling():
            handle.report.proof.kernels.skipped = "calls are counted only: another profiler is running"
        self._watching = True
        if profiled:
            self._ranges = ModuleRanges(self._watched(module))
            self._ranges.open()
            self._recording = profiler()
            self._recording.start()

    def end_batch(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if not self._watching:
            return
        recorded = self._recording
        self.close()
        report = self._accelerated().report
        seen = None
        if recorded is not None:
            if self._directory is not None:
                keep_trace(recorded, self._directory, trainer.global_rank)
            names = {r.path for r in self._asked}
            fused = {part for r in self._asked for part in r.launches if r.feature != "attention"}
            seen = read(recorded.events(), names, fused)
        findings = judge(self._asked, report, self._fused_calls)
        findings = _with_kernels(findings, seen, inside_blocks(self._asked))
        proof = report.proof.kernels
        self._fill(proof, findings, seen)
        proof.missing += _refused_by_name(self._accelerated())
        if self._verify == "off":
            return
        missing = list(dict.fromkeys(line for lines in everywhere(proof.missing, trainer) for line in lines))
        if missing and self._verify == "strict":
            raise ProofError(_message(missing))
        if self._batches > 1:
            feature, where, text = proof.row()
            self._say("\n".join([f"lightning-liger: {feature.lower()} ({where}): {text}", *_lines(proof)]))
        surprising = [f"{f.request.path}: {f.reason}" for f in findings if not f.ran and "replaced after" in f.reason]
        if surprising:
            rank_zero_warn(_message(surprising))

    def close(self) -> None:
        self._watching = False
        if self._recording is not None:
            recording, self._recording = self._recording, None
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            recording.stop()
        if self._ranges is not None:
            self._ranges.close()
            self._ranges = None

    def end_training(self, trainer: Any, module: Any) -> None:
        report = self._accelerated().report.proof.kernels
        if not report.step:
            report.skipped = f"training ended before step {_WARMUP + 1}, which would have been watched"

    # -- what is said ----------------------------------------------------------------------------------------------

    def _watched(self, module: nn.Module) -> dict[nn.Module, str]:
        """The modules to put hooks on: those of requests, or all for a trace.

        Compiled code does not see new hooks, and a block with hooks would not run compiled, or replayed.
        """
        compiled = inside_compiled(module) | inside_blocks(self._asked)
        if self._directory is not None:
            paths = {m: clean(path) or type(m).__name__ for path, m in module.named_modules()}
        else:
            paths = {r.module: r.path for r in self._asked}
        return {m: path for m, path in paths.items() if m not in compiled}

    def _fill(self, proof: KernelProofReport, findings: list[Finding], seen: Seen | None) -> None:
        proof.step, proof.how = self._batches, "counted" if seen is None else "profiled"
        for finding in findings:
            feature = finding.request.feature
            ran, asked = proof.ran.get(feature, (0, 0))
            proof.ran[feature] = ran + finding.ran, asked + 1
            if not finding.ran:
                where = proof.idle if finding.idle else proof.missing
                where.append(f"{feature} on {finding.request.path}: {finding.reason}")
        attention = [f.request.binding for f in findings if f.request.feature == "attention" and f.ran]
        proof.backends = tuple(sorted({getattr(binding, "backend", "") for binding in attention}))
        blocks = [f.request.binding for f in findings if f.request.feature == BLOCKS and f.ran]
        proof.ways = tuple(sorted({getattr(binding, "way", "") for binding in blocks}))
        if seen is not None and seen.total:
            proof.shares, proof.device_ms = seen.shares(), seen.total / 1e3


def _with_kernels(findings: list[Finding], seen: Seen | None, unseen: set[nn.Module]) -> list[Finding]:
    """Take back what is said to have run and launched none of its kernels; on ``unseen`` modules launches are unknown."""
    if seen is None or not seen.under:
        return findings
    made = []
    for finding in findings:
        expected = () if finding.request.module in unseen else finding.request.launches
        launched = seen.under.get(finding.request.path, set())
        if finding.ran and expected and not any(part in name.lower() for name in launched for part in _low(expected)):
            instead = ", ".join(sorted(n[:60] for n in launched)[:3]) or "nothing"
            finding = Finding(finding.request, False, f"its kernel was not launched; what was: {instead}")
        made.append(finding)
    return made


def _low(parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.lower() for part in parts)


def _refused_by_name(handle: Accelerated) -> list[str]:
    """Kernels that the user asked for by name and that are on no module at all."""
    choice, report = handle.settings.kernels, handle.report.kernels
    if choice is True:
        return [f"kernels=True: {report.off}"] if report.off else []
    if not isinstance(choice, Mapping):
        return []
    missing = []
    for op in (op for op, value in choice.items() if value is True):
        known = report.ops.get(op)
        if known is None or not known.applied:
            why = report.off or "; ".join(known.refused if known is not None else ()) or "no module looks like it"
            missing.append(f"kernels={{{op!r}: True}}: {why}")
    return missing


def _lines(proof: KernelProofReport) -> list[str]:
    return [f"  - {reason}" for reason in proof.reasons()]


def _message(missing: list[str]) -> str:
    listed = "".join(f"\n  - {line}" for line in missing[:8]) + ("\n  - …" if len(missing) > 8 else "")
    return (
        f"lightning-liger was asked for what did not run in an early training step:{listed}\n"
        "Switch it off (kernels={'<op>': False}, padding_free=False, fused_head=False), or go on with verify='warn'."
    )
