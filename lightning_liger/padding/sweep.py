"""Every language model type of transformers, padded against accelerated: ``python -m lightning_liger.padding.sweep``.

For each type a small random model with its head is trained for one step, padded and accelerated, in double precision:
loss and every gradient, with padding on the right and on the left. The probe decides by the backbone's hidden states;
this looks at what the user sees, so it checks the probe from outside. Each type runs in a forked process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# A clean model differs by the rounding of its fp32 parts, the smallest leak seen among real ones is 4.5e-4.
TOLERANCE = 2e-4
_LARGEST = 40_000_000
_LENGTHS = (17, 31, 9)


@dataclass(frozen=True)
class Row:
    """What was found for one model type.

    ``result``: ``packed`` (equal), ``padded`` (left as it is, equal), ``unbuildable``, or ``DIFFERENT``, which must
    never be. ``difference``: the largest of loss and gradients, relative.
    """

    kind: str
    model_type: str
    model: str = ""
    result: str = "unbuildable"
    reason: str = ""
    difference: float = 0.0
    positions: str = ""
    probe_seconds: float = 0.0


def model_types(kind: str) -> list[str]:
    """Model types that ``AutoModelForCausalLM`` (``causal``) or ``AutoModelForMaskedLM`` (``masked``) builds."""
    from transformers.models.auto import modeling_auto as auto

    names = {"causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    return sorted(names[kind])


def small_model(kind: str, model_type: str) -> Any:
    """A random model of ``model_type``, of a few hundred thousand parameters, in double precision and training mode.

    Raises:
        Exception: whatever the model's own code raises; its defaults may not fit each other, or need other packages.
    """
    from transformers import CONFIG_MAPPING

    from lightning_liger.padding.tiny import tiny_config

    config = tiny_config(CONFIG_MAPPING[model_type]())
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True  # or an encoder's class looks both ways
    config._experts_implementation = "eager"  # grouped kernels have no double precision
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in _auto(kind).from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"the smallest configuration found has {size / 1e6:.0f}M parameters")
    model = _auto(kind).from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    return model.train()


def _auto(kind: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForCausalLM if kind == "causal" else AutoModelForMaskedLM


def batch(vocabulary: int, pad: int, left: bool, first_counts: bool) -> dict[str, Tensor]:
    """Three rows of different lengths; labels are ignored at padding, and at first tokens unless ``first_counts``."""
    generator = torch.Generator().manual_seed(3)
    longest = max(_LENGTHS) + 3  # every row has padding
    ids = torch.full((len(_LENGTHS), longest), pad)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, length in enumerate(_LENGTHS):
        start = longest - length if left else 0
        part = slice(start, start + length)
        tokens = torch.randint(0, vocabulary - 1, (length,), generator=generator)
        ids[row, part] = tokens + (tokens >= pad)
        mask[row, part] = 1
        labels[row, part] = torch.randint(0, vocabulary, (length,), generator=generator)
        if not first_counts:
            labels[row, start] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _step(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss and gradients of one step; random draws, if the model makes any, are the same each time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    loss = model(**inputs).loss
    loss.backward()
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {**found, "": loss.detach().clone()}


def _difference(plain: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    if plain.keys() != other.keys():
        return float("inf")
    # a gradient that is all rounding has no scale of its own
    scale = max((float(v.abs().max()) for k, v in plain.items() if k), default=1.0)
    worst = float((plain[""] - other[""]).abs() / plain[""].abs().clamp_min(1e-9))
    for name, value in plain.items():
        own = max(float(value.abs().max()), 1e-4 * scale)
        worst = max(worst, float((value.double() - other[name].double()).abs().max()) / own)
    return worst if worst == worst else float("inf")


def examine(kind: str, model_type: str) -> Row:
    """Build, train plain, train accelerated, compare."""
    from lightning_liger.accelerate import accelerate
    from lightning_liger.padding.boundary import PackedBackbone

    row = Row(kind, model_type)
    try:
        model = small_model(kind, model_type)
        row = replace(row, model=type(model).__name__)
        vocabulary = model.get_input_embeddings().num_embeddings
        pad = getattr(model.config, "pad_token_id", None)
        pad = pad if isinstance(pad, int) and 0 <= pad < vocabulary else 0
        batches = [batch(vocabulary, pad, left, first) for left, first in ((False, True), (True, False), (True, True))]
        plain = [_step(model, b) for b in batches]
    except Exception as error:  # third-party model code; the table shows what it raised
        return replace(row, reason=_short(error))
    if not all(bool(v.isfinite().all()) for step in plain for v in step.values()):
        return replace(row, reason="its plain padded run gives values that are not finite")
    repeated = _difference(plain[0], _step(model, batches[0]))
    if repeated > TOLERANCE:
        return replace(row, reason=f"its plain run differs from itself by {repeated:.1e}")
    started = time.perf_counter()
    accelerated = accelerate(model)
    row = replace(row, probe_seconds=round(time.perf_counter() - started, 2))
    try:
        worst = max(_difference(p, _step(model, b)) for p, b in zip(plain, batches, strict=True))
    except Exception as error:  # plain ran, so ours must: this is a finding, not a reason to stop the sweep
        return replace(row, result="DIFFERENT", reason="raises: " + _short(error))
    padding = accelerated.report.padding
    bound = [m.__dict__["forward"] for m in model.modules() if isinstance(m.__dict__.get("forward"), PackedBackbone)]
    packed = padding.packed_calls > 0 and padding.packed_calls > padding.padded_runs
    row = replace(
        row,
        result="packed" if packed else "padded",
        reason="" if packed else "; ".join(padding.off) or "no backbone was found",
        positions=bound[0].positions if bound and packed else "",
        difference=worst,
    )
    return row if worst <= TOLERANCE else replace(row, result="DIFFERENT", reason=f"differs by {worst:.1e}")


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:140]}"


# -- one process per type --------------------------------------------------------------------------------------------


def _child(pipe: Connection, kind: str, model_type: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        pipe.send(asdict(examine(kind, model_type)))
    pipe.close()


def sweep(types: Iterable[tuple[str, str]], *, jobs: int = 1, seconds: float = 120.0) -> list[Row]:
    """Examine ``(kind, model_type)`` pairs, ``jobs`` at a time, each at most ``seconds`` long."""
    import transformers.models.auto.modeling_auto  # noqa: F401, children inherit what is loaded before the fork

    context = multiprocessing.get_context("fork")
    waiting = list(types)[::-1]
    order = {pair: n for n, pair in enumerate(waiting[::-1])}
    running: list[tuple[tuple[str, str], Any, Connection, float]] = []
    rows: list[Row] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            pair = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(sender, *pair), daemon=True)
            process.start()
            sender.close()
            running.append((pair, process, receiver, time.monotonic() + seconds))
        for entry in list(running):
            pair, process, receiver, deadline = entry
            row = None
            if receiver.poll(0.02):
                try:
                    row = Row(**receiver.recv())
                except EOFError:
                    process.join()
                    row = Row(*pair, reason=f"the process died (exit code {process.exitcode})")
            elif time.monotonic() > deadline:
                process.kill()
                row = Row(*pair, reason=f"took longer than {seconds:.0f} s")
            if row is not None:
                process.join()
                running.remove(entry)
                rows.append(row)
                print(f"{row.kind:7}{row.model_type:28}{row.result:12}{row.reason[:120]}", file=sys.stderr, flush=True)
    return sorted(rows, key=lambda r: order[r.kind, r.model_type])


# -- the page ----------------------------------------------------------------------------------------------------------


def render(rows: Sequence[Row]) -> str:
    """docs/architectures.md."""
    import transformers

    import lightning_liger

    counts = {(r.kind, r.result): 0 for r in rows}
    for r in rows:
        counts[r.kind, r.result] += 1
    kinds = list(dict.fromkeys(r.kind for r in rows))
    lines = [
        "# Which architectures run without padding",
        "",
        "Generated by `python -m lightning_liger.padding.sweep`; not edited by hand. "
        f"lightning-liger {lightning_liger.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, CPU.",
        "",
        "For every model type a small random model with its head is trained for one step in double precision, as it "
        "is and accelerated, with padding on the right and on the left, and the loss and every gradient are compared "
        f"(relative tolerance {TOLERANCE:g}). **packed**: padding is removed and the result is equal. **padded**: "
        "padding stays, for the reason given, and the result is equal. **unbuildable**: the type's default "
        "configuration could not be made small, or did not run, in this environment; with a real model the same probe "
        "decides at start-up. What decides is that probe, not this table.",
        "",
        "| kind | packed, equal | left padded | cannot be built here | packed and different |",
        "|---|---|---|---|---|",
    ]
    for kind in kinds:
        found = [str(counts.get((kind, result), 0)) for result in ("packed", "padded", "unbuildable", "DIFFERENT")]
        lines.append(f"| {kind} | {' | '.join(found)} |")
    for kind in kinds:
        lines += ["", f"## {kind.capitalize()} language models", ""]
        lines += ["| type | model | result | difference | reason |", "|---|---|---|---|---|"]
        for r in rows:
            if r.kind == kind:
                difference = f"{r.difference:.0e}" if r.result in ("packed", "padded") else ""
                reason = r.reason.replace("|", "\\|").replace("\n", " ")
                lines.append(f"| {r.model_type} | {r.model} | {r.result} | {difference} | {reason} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit code is 1 if any type is packed and differs."""
    parser = argparse.ArgumentParser(prog="python -m lightning_liger.padding.sweep", description=__doc__)
    parser.add_argument("types", nargs="*", help="model types, such as llama or causal:llama; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit per type")
    parser.add_argument("--write", type=Path, help="write the table here, for example docs/architectures.md")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    every = [(kind, name) for kind in ("causal", "masked") for name in model_types(kind)]
    chosen = [p for p in every if not options.types or p[1] in options.types or ":".join(p) in options.types]
    if not chosen:
        parser.error(f"no such model types: {' '.join(options.types)}")
    rows = sweep(chosen, jobs=options.jobs, seconds=options.seconds)
    if options.write is not None:
        options.write.write_text(render(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    for result in ("packed", "padded", "unbuildable", "DIFFERENT"):
        print(f"{result}: {sum(r.result == result for r in rows)}")
    return int(any(r.result == "DIFFERENT" for r in rows))


if __name__ == "__main__":
    sys.exit(main())
