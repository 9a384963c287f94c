"""Every language model type of transformers, padded against accelerated: ``python -m lightning_liger.padding.sweep``.

For each type a small random model with its head is trained for one step, padded and accelerated, in double precision:
loss and every gradient, with padding on the right and on the left. The probe decides by the backbone's hidden states;
this looks at what the user sees, so it checks the probe from outside. Each type runs in a forked process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_liger.padding.sweep_page import Row, render

# A clean model differs by the rounding of its fp32 parts, the smallest leak seen among real ones is 4.5e-4.
TOLERANCE = 2e-4
_LARGEST = 40_000_000
_LENGTHS = (17, 31, 9)


def model_types(kind: str) -> list[str]:
    """Model types that ``AutoModelForCausalLM`` (``causal``) or ``AutoModelForMaskedLM`` (``masked``) builds."""
    from transformers.models.auto import modeling_auto as auto

    names = {"causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    return sorted(names[kind])


# What a type needs said before its configuration can be built at all, or be small.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 5},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "longformer": {"attention_window": 8},
    "luke": {"entity_emb_size": 64},
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 2, "qk_channels": 32},
    "reformer": {"axial_pos_embds": False},
    "xlstm": {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2, "chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
}


def small_models(kind: str, model_type: str) -> Iterator[tuple[Callable[[], Any], float]]:
    """Ways to make a random model of ``model_type`` of a few hundred thousand parameters, best first.

    Yields:
        A function that builds it in training mode, and the tolerance that its precision allows.
    """
    for dtype, tolerance in ((torch.float64, TOLERANCE), (torch.float32, 10 * TOLERANCE)):
        for complete in (False, True):
            yield functools.partial(_small_model, kind, model_type, dtype, complete), tolerance


def _small_model(kind: str, model_type: str, dtype: torch.dtype, complete: bool) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM

    from lightning_liger.padding.tiny import fill_in, tiny_config

    auto = AutoModelForCausalLM if kind == "causal" else AutoModelForMaskedLM
    config = CONFIG_MAPPING[model_type](**_ARGUMENTS.get(model_type, {}))
    if complete:
        fill_in(config)
    config = tiny_config(config)
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True  # or an encoder's class looks both ways
    config._experts_implementation = "eager"  # grouped kernels have no double precision
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"the smallest configuration found has {size / 1e6:.0f}M parameters")
    model = auto.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    return model.train()


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
    worst = 0.0
    for name, value in plain.items():
        own = max(float(value.abs().max()), 1e-4 * scale)
        error = float((value.double() - other[name].double()).abs().max()) / own
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def _finite(step: dict[str, Tensor]) -> bool:
    return all(bool(v.isfinite().all()) for v in step.values())


def _plain_steps(model: Any) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Batches and what the plain model makes of them, right-padded first; without those that give it NaN.

    Raises:
        ValueError: not even a right-padded batch gives numbers, or not the same ones twice.
    """
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", 128)
    pad = getattr(model.config, "pad_token_id", None)
    pad = pad if isinstance(pad, int) and 0 <= pad < vocabulary else 0
    sides = ((False, True), (True, False), (True, True))
    batches = [batch(vocabulary, pad, left, first) for left, first in sides]
    steps = [(b, _step(model, b)) for b in batches]
    if not _finite(steps[0][1]):
        raise ValueError("its plain padded run gives values that are not finite")
    repeated = _difference(steps[0][1], _step(model, batches[0]))
    if repeated > TOLERANCE:
        raise ValueError(f"its plain run differs from itself by {repeated:.1e}")
    return [(b, s) for b, s in steps if _finite(s)]


def examine(kind: str, model_type: str) -> Row:
    """Build, train plain, train accelerated, compare."""
    row = Row(kind, model_type)
    for build, tolerance in small_models(kind, model_type):
        try:
            model = build()
            steps = _plain_steps(model)
        except Exception as error:  # third-party model code; the table shows what it raised first
            row = replace(row, reason=row.reason or _short(error))
            continue
        return _compared(replace(row, model=type(model).__name__, reason=""), model, steps, tolerance)
    return row


def _compared(row: Row, model: Any, steps: list[tuple[dict[str, Tensor], dict[str, Tensor]]], tolerance: float) -> Row:
    from lightning_liger.accelerate import accelerate
    from lightning_liger.padding.boundary import PackedBackbone

    started = time.perf_counter()
    try:
        accelerated = accelerate(model)
        row = replace(row, probe_seconds=round(time.perf_counter() - started, 2))
        worst = max(_difference(plain, _step(model, inputs)) for inputs, plain in steps)
    except Exception as error:  # plain ran, so ours must: this is a finding, not a reason to stop the sweep
        return replace(row, result="DIFFERENT", reason="raises " + _short(error))
    padding = accelerated.report.padding
    bound = [m.__dict__["forward"] for m in model.modules() if isinstance(m.__dict__.get("forward"), PackedBackbone)]
    packed = padding.packed_calls > padding.padded_runs
    row = replace(
        row,
        result="packed" if packed else "padded",
        reason="" if packed else "; ".join(padding.off) or "no backbone was found",
        positions=bound[0].verdict.positions if bound and packed else "",
        difference=worst,
    )
    if len(steps) < 3 and packed:
        row = replace(row, reason="right padding only: the plain run gives NaN with padding on the left")
    return row if worst <= tolerance else replace(row, result="DIFFERENT", reason=f"differs by {worst:.1e}")


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


# -- the command -----------------------------------------------------------------------------------------------------


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
        options.write.write_text(render(rows, TOLERANCE))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    for result in ("packed", "padded", "unbuildable", "DIFFERENT"):
        print(f"{result}: {sum(r.result == result for r in rows)}")
    return int(any(r.result == "DIFFERENT" for r in rows))


if __name__ == "__main__":
    sys.exit(main())
