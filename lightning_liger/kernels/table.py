"""Which kernels every architecture that Liger knows gets: ``python -m lightning_liger.kernels.table``.

Each type is built with its default configuration on the meta device. Modules are compared as they are before training,
with the kernels' formulas in PyTorch (:mod:`lightning_liger.kernels.reference`), so no GPU and no kernel is needed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_liger.kernels import liger
from lightning_liger.kernels.apply import Kernels
from lightning_liger.kernels.reference import instead_of_triton
from lightning_liger.kernels.registry import known_ops
from lightning_liger.kernels.report import KernelReport, OpReport
from lightning_liger.pages import show_or_write
from lightning_liger.patching import Switch

_KINDS = ("ForCausalLM", "ForImageTextToText", "")


# what a default configuration leaves out and its model needs.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
}
_CLASSES = {"mllama_text_model": "MllamaForCausalLM"}


class Maker:
    """Builds models of one type.

    Attributes:
        config: the default configuration.
    """

    def __init__(self, model_type: str) -> None:
        import transformers

        self.config = transformers.AutoConfig.for_model(model_type, **_ARGUMENTS.get(model_type, {}))
        self._makers: list[Any] = [getattr(transformers, f"AutoModel{kind}").from_config for kind in _KINDS]
        if model_type in _CLASSES:
            self._makers = [getattr(transformers, _CLASSES[model_type])]

    def build(self, config: Any) -> Any:
        """A model of this configuration, with its language-model head where it has one.

        Raises:
            RuntimeError: transformers cannot build it; naming the last error.
        """
        last: Exception | None = None
        for make in self._makers:
            try:
                return make(config)
            except Exception as error:  # another kind of model, or a configuration that does not fit itself
                last = error
        raise RuntimeError(f"{type(last).__name__}: {str(last).splitlines()[0]}"[:160])


def build(model_type: str) -> Any:
    """A model of this type in its default size, on the meta device.

    Raises:
        RuntimeError: transformers cannot build it; naming the last error.
    """
    from lightning_liger.padding.tiny import tiny_config

    made = Maker(model_type)
    with torch.device("meta"):
        try:
            return made.build(made.config)
        except RuntimeError:  # a default configuration that does not fit itself
            return made.build(tiny_config(made.config))


def look_at(model_type: str) -> tuple[KernelReport, liger.Knowledge | None]:
    """What ``accelerate(kernels=True)`` would bind in a model of this type, and what Liger knows about it."""
    report = KernelReport()
    model = build(model_type)
    with instead_of_triton():
        Kernels(True, report, Switch(True)).bindings(model)
    return report, liger.knowledge(model)


def cell(op: OpReport | None) -> str:
    """One field of the table."""
    if op is None or not op.found:
        return "–"
    parts = [f"{n} {source}" for source, n in sorted(op.sources.items())]
    if left := op.found - op.applied:
        parts.append(f"{left} refused")
    return ", ".join(parts)


def markdown(types: Sequence[str]) -> str:
    """The table and the reasons of all refusals.

    Raises:
        RuntimeError: Liger is not installed.
    """
    if not liger.model_types():
        raise RuntimeError("The table lists the architectures that Liger knows; liger-kernel is not installed.")
    ops = known_ops()
    lines = [f"| type | {' | '.join(ops)} |", f"|---{'|---' * len(ops)}|"]
    reasons: dict[str, list[str]] = {}
    errors: list[str] = []
    for model_type in types:
        try:
            report, known = look_at(model_type)
        except (RuntimeError, ValueError, KeyError) as error:
            lines.append(f"| {model_type} | not built: {error} |{' |' * (len(ops) - 1)}")
            continue
        lines.append(f"| {model_type} | {' | '.join(cell(report.ops.get(op)) for op in ops)} |")
        if known is not None and known.error:
            errors.append(f"* {model_type}: `{known.error}`")
        for op in report.ops.values():
            for reason in op.refused:
                reasons.setdefault(f"{op.title}: {reason}", []).append(model_type)
        print(f"{model_type}: {report.applied} modules", file=sys.stderr)
    lines += ["", "Refused:", ""]
    lines += [f"* {reason} ({', '.join(where)})" for reason, where in sorted(reasons.items())]
    if errors:
        lines += [
            "",
            "Liger's own function raises on these, so that its knowledge about them is incomplete:",
            "",
            *errors,
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or write it between the marks of a page."""
    parser = argparse.ArgumentParser(prog="python -m lightning_liger.kernels.table", description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; default: all that Liger knows")
    parser.add_argument("--write", type=Path, help="page to write the table into, between its marks")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return show_or_write(markdown(given.types or liger.model_types()), given.write)


if __name__ == "__main__":
    sys.exit(main())
