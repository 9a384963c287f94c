"""How blocks may run on ranks that share a batch: alike on all of them, because they exchange tokens in attention."""

from __future__ import annotations

from lightning_liger.choices import CompileChoice
from lightning_liger.compilation.report import BlocksReport
from lightning_liger.sequence import SequenceGroup
from lightning_liger.tuning.blocks import can_time


def compile_choice(choice: CompileChoice, sequence: SequenceGroup | None, report: BlocksReport) -> CompileChoice:
    """The ``compile`` option as ``sequence`` can have it.

    Raises:
        ValueError: it is asked for what cannot be had.
    """
    if sequence is None or choice not in ("auto", "cudagraphs"):
        return choice
    if choice == "cudagraphs":
        raise ValueError(
            "compile='cudagraphs' does not work together with sequence_parallel_size: what ranks exchange in attention is "
            "not recorded. Set compile=True, False or 'auto'."
        )
    if can_time():
        report.refuse("not timed, because ranks that share a batch would wait for each other")
    return False
