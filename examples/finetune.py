"""Fine-tune a causal language model plain, then with one feature more at a time, and show what each is worth.

Without options: a small model on question and answer pairs from Python's own documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import torch

from demo_job import DemoJob
from docstrings import write_docstring_pairs
from lightning_liger.bench.measuring import measure
from lightning_liger.bench.messages import Plan
from lightning_liger.bench.picture import save_picture
from lightning_liger.bench.results import Comparison
from lightning_liger.bench.showing import losses, show
from lightning_liger.bench.variants import FEATURES
from lightning_liger.bench.worker import quiet
from lightning_liger.printing import printable
from sft_data import ACCEPTED, DataError, read_pairs
from small_model import SmallModel, save_small_model


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=f"In --data FILE, {ACCEPTED}"
    )
    add = parser.add_argument
    add("--data", metavar="FILE.jsonl", help="rows to train on (default: the standard library's docstrings)")
    add("--model", metavar="PATH", help="local checkpoint directory or .gguf file (default: a small random Qwen2)")
    add("--max-steps", type=int, default=12, help="optimizer steps of each variant (default: %(default)s)")
    add("--batch-size", type=int, default=16, help="rows in a batch (default: %(default)s)")
    add("--max-length", type=int, default=512, help="longer rows are cut to this many tokens (default: %(default)s)")
    add("--lr", type=float, default=3e-4, help="learning rate of AdamW (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and order (default: %(default)s)")
    add("--accelerator", default="auto", help="Lightning's accelerator: cpu, cuda, auto, ... (default: %(default)s)")
    add("--precision", default="32-true", help="Lightning's precision (default: %(default)s)")
    add("--output", metavar="DIR", default="demo_output", help="where results are written (default: %(default)s)")
    add("--steps-per-turn", type=int, default=3, help="steps before another variant's turn (default: %(default)s)")
    small = parser.add_argument_group("the small model that is made when no --model is given")
    small.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    small.add_argument("--hidden-size", type=int, default=384, help="a multiple of 64 (default: %(default)s)")
    small.add_argument("--vocab-size", type=int, default=8192, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("batch_size", "steps_per_turn", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.max_steps < 2:
        parser.error("--max-steps must be at least 2: the first turn is warm-up, and one is needed to measure")
    if args.max_length < 2:
        parser.error("--max-length must be at least 2: the loss needs a token and the one after it")
    if args.hidden_size < 64 or args.hidden_size % 64:
        parser.error("--hidden-size must be a multiple of 64, the size of an attention head")
    if args.vocab_size < 512:
        parser.error("--vocab-size must be at least 512: the first 258 entries are the bytes and two marks")
    if args.model is not None:
        path = Path(args.model)
        if not path.exists():
            parser.error(f"--model {path}: no such directory or file; give a local checkpoint or a .gguf file")
        if path.suffix != ".gguf" and not (path / "config.json").is_file():
            parser.error(f"--model {path}: neither a .gguf file nor a checkpoint directory with a config.json")
    return args


def save(result: Comparison, output: Path) -> str:
    """Writes the numbers, and a picture where matplotlib is there; says where."""
    (output / "result.json").write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    try:
        save_picture([result], output / "comparison.png")
    except ImportError:
        return f"Numbers: {output / 'result.json'} (install matplotlib for a picture)"
    return f"Picture: {output / 'comparison.png'}   numbers: {output / 'result.json'}"


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    quiet()
    # For both variants: threads that wait asleep, not spinning, so that a busy machine slows the two alike.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TQDM_DISABLE", "1")  # a GGUF file brings a bar that transformers' own switch does not reach
    started = time.perf_counter()
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    try:
        if args.data is None:
            data = output / "docstrings.jsonl"
            write_docstring_pairs(data)
            source = f"Python {platform.python_version()}'s own docstrings"
        else:
            data, source = Path(args.data), args.data
        pairs = read_pairs(data)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.model is None:
        model = str(output / "model")
        texts = (text for pair in pairs for text in pair)
        size = SmallModel(args.layers, args.hidden_size, args.vocab_size, args.max_length, args.seed)
        description = save_small_model(texts, size, output / "model")
    else:
        model = description = args.model
    job = DemoJob(
        str(data), model, args.batch_size, args.max_length, args.lr, args.seed, args.accelerator, args.precision
    )
    turn = min(args.steps_per_turn, args.max_steps // 2)
    plan = Plan(warmup=turn, steps=turn, turns=args.max_steps // turn - 1, seed=args.seed)
    print("The same LightningModule, trained as it is, and with more of `callbacks=[LigerCallback(...)]` each time.\n")
    print(f"  data    {len(pairs):,} rows from {source}")
    print(f"  model   {description}")
    print(f"  batch   {args.batch_size} shuffled rows, padded to the longest, at most {args.max_length} tokens each")
    print(
        f"  run     {plan.most_steps} steps each, in turns; {args.precision}; torch {torch.__version__}\n", flush=True
    )
    # token batches hold several times as many samples a step: `lightning-liger bench` measures those as well
    features = tuple(feature for feature in FEATURES if feature != "batches")
    tell = lambda line: print(f"  {line}", flush=True)  # noqa: E731
    result = measure(job, name="Result", plan=plan, features=features, tell=tell)
    trace = result.plain.trace
    if not result.plain.measured and not result.plain.out_of_memory:
        # what the user can mend is one line; anything else needs its traceback
        mendable = result.plain.failure.startswith(("DataError", "MisconfigurationException", "OSError"))
        print(f"error: {result.plain.failure if mendable or not trace else trace}", file=sys.stderr)
        return 1
    print("\n" + printable(losses(result)))
    print("\n" + printable(show(result)) + "\n")
    print(f"{save(result, output)}   {time.perf_counter() - started:.0f} s in all")
    problems = result.problems()
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
