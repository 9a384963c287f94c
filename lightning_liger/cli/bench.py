"""``lightning-liger bench``: what each feature is worth on a module and data of the user's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lightning_liger.cli.errors import CommandError
from lightning_liger.cli.outcome import conclude
from lightning_liger.cli.targets import is_named, load

DESCRIPTION = """\
Measures, in turns, what each feature is worth on your own module and data: plain, then one feature more at a time.
Nothing of yours is edited or saved; each run starts from the same weights and the same order of data.
"""

EPILOG = """\
--suite long finds the longest document that trains, plain and with one feature more at a time.

TARGET is one of
  config.yaml        of a LightningCLI (`model: {class_path: ...}`, `data: {class_path: ...}`), or
  script.py:build    a function without arguments that returns a LightningModule, (module, data) or
                     (module, data, trainer_options); package.module:build works as well.
Of the Trainer's options precision, accelerator, accumulate_grad_batches and clipping are kept. A LigerCallback in
`callbacks` says with which options its features are measured.

Exit codes: 0 measured, 1 a variant failed or has another loss than plain, 2 the command line is wrong. A variant that
runs out of memory is a row of the table, and no failure.
"""


def parser() -> argparse.ArgumentParser:
    """The options, as ``--help`` shows them."""
    from lightning_liger.bench.peers import PEERS
    from lightning_liger.bench.suites import SUITES
    from lightning_liger.bench.variants import FEATURES

    made = argparse.ArgumentParser(
        prog="lightning-liger bench",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("target", metavar="TARGET", nargs="?", help="config.yaml or script.py:build, see below")
    add("--suite", choices=sorted([*SUITES, LONG]), help="a built-in set of models and data instead of TARGET")
    add("--only", metavar="NAME", action="append", help="of a suite, this part alone; may be given again")
    add(
        "--features",
        metavar="A,B",
        help=f"measure these only, of {','.join(FEATURES)} (default: all that can run here)",
    )
    add(
        "--peers",
        metavar="A,B",
        default="none",
        help=f"of a suite: what others do with the same work; all, none, or some of {','.join(PEERS)} (default: none)",
    )
    add("--steps", type=int, default=4, help="optimizer steps of each turn (default: %(default)s)")
    add("--warmup", type=int, default=4, help="optimizer steps before the first turn (default: %(default)s)")
    add("--rounds", type=int, default=3, help="turns of each variant (default: %(default)s)")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="of the token batches (default: positions of the largest padded batch)",
    )
    add("--order", choices=("auto", "turns", "rounds"), default="auto", help=_ORDER_HELP)
    add("--time-limit", type=float, metavar="SECONDS", help="begin no further round that would end later")
    add("--step-limit", type=float, default=30.0, metavar="SECONDS", help=_STEP_HELP)
    add("--longest", type=int, metavar="N", help="of --suite long: look for no longer document")
    add("--memory", type=float, metavar="GB", help=_MEMORY_HELP)
    add("--seed", type=int, default=0, help="of weights, data order and dropout (default: %(default)s)")
    add("--accelerator", help="Lightning's accelerator: cpu, cuda, ... (default: the target's own, or auto)")
    add("--precision", help="Lightning's precision, such as bf16-mixed (default: the target's own)")
    add("--json", action="store_true", help="print the result as JSON instead of tables")
    add("--output", metavar="DIR", help="write bench.json, bench.txt and bench.png there")
    return made


LONG = "long"
_MEMORY_HELP = "of --suite long: memory that it may take of the device (on a CPU: that steps may take beside the model)"
_STEP_HELP = "of --suite long: try no document whose step would take longer (default: %(default)g)"
_ORDER_HELP = (
    "turns: a process for each variant, side by side; rounds: one after the other, where memory does not hold several "
    "(default: by memory)"
)


def main(argv: list[str]) -> int:
    """Run the subcommand; the exit code."""
    options = parser()
    given = options.parse_args(argv)
    _check(given)
    if given.suite == LONG:
        from lightning_liger.cli.long import run

        return run(given)
    from lightning_liger.bench.processes import prepare

    prepare()
    from lightning_liger.bench.measuring import measure
    from lightning_liger.bench.showing import show
    from lightning_liger.printing import printable

    builds = _builds(given)
    results = []
    for name, build in builds:
        result = measure(
            build,
            name=name,
            plan=_plan(given),
            features=_features(given.features),
            peers=_peers(given),
            budget=given.max_tokens,
            order={"auto": None, "turns": "side by side", "rounds": "one after the other"}[given.order],
            seconds=given.time_limit,
            tell=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
        )
        results.append(result)
        if not given.json:
            print("\n" + printable(show(result)) + "\n", flush=True)
        if given.output:
            _write(results, Path(given.output))
    traces = (row.trace for r in results for row in r.rows if row.trace)
    return conclude(results, traces, _as_dict if given.json else None)


def _check(given: argparse.Namespace) -> None:
    if (given.target is None) == (given.suite is None):
        raise CommandError("give either TARGET (config.yaml or script.py:build) or --suite.")
    for name in ("step_limit", "longest", "memory"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            raise CommandError(f"--{name.replace('_', '-')} {value:g}: must be more than 0.")
    for name, least in (("steps", 1), ("warmup", 1), ("rounds", 1)):
        if getattr(given, name) < least:
            raise CommandError(f"--{name} {getattr(given, name)}: must be at least {least}.")
    if given.peers != "none" and given.suite is None:
        raise CommandError(f"--peers {given.peers}: peers train the data and model of a --suite, and TARGET is given.")
    if given.max_tokens is not None and given.max_tokens < 1:
        raise CommandError(f"--max-tokens {given.max_tokens}: expected a positive number of tokens, such as 16384.")


def _features(text: str | None) -> tuple[str, ...] | None:
    from lightning_liger.bench.variants import FEATURES

    return None if text is None else _named("--features", "feature", text, FEATURES)


def _peers(given: argparse.Namespace) -> tuple[str, ...]:
    from lightning_liger.bench.peers import PEERS

    if given.peers in ("all", "none"):
        return PEERS if given.peers == "all" else ()
    return _named("--peers", "peer", given.peers, PEERS)


def _named(option: str, kind: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in chosen:
        if name not in known:
            raise CommandError(f"{option} {text}: no {kind} {name!r}; there are {', '.join(known)}.")
    return chosen


def _plan(given: argparse.Namespace) -> Any:
    from lightning_liger.bench.messages import Plan

    trainer = {k: getattr(given, k) for k in ("accelerator", "precision") if getattr(given, k) is not None}
    return Plan(given.warmup, given.steps, given.rounds, given.seed, trainer)


def _builds(given: argparse.Namespace) -> list[tuple[str, Any]]:
    if given.suite is not None:
        return _suite(given.suite, given.only)
    if given.only:
        raise CommandError(f"--only {given.only[0]}: names a part of a --suite, but TARGET is given.")
    from lightning_liger.bench.sources import Config, Script

    target = given.target
    if target.endswith((".yaml", ".yml", ".json")):
        if not Path(target).is_file():
            raise CommandError(f"TARGET {target}: there is no such file.")
        return [(Path(target).stem, Config(str(Path(target).resolve())))]
    if is_named(target):
        if not callable(load(target, "TARGET")):
            raise CommandError(f"TARGET {target}: expected a function that returns a LightningModule and its data.")
        return [(target.rpartition(":")[0].rpartition("/")[2].removesuffix(".py"), Script(target))]
    raise CommandError(f"TARGET {target}: expected config.yaml, script.py:build or package.module:build.")


def _suite(name: str, only: list[str] | None) -> list[tuple[str, Any]]:
    from lightning_liger.bench.suites import SUITES

    parts = SUITES[name]()
    known = [part for part, _ in parts]
    for wanted in only or []:
        if wanted not in known:
            raise CommandError(f"--only {wanted}: --suite {name} has {', '.join(known)}.")
    return [(f"{name} {part}", build) for part, build in parts if only is None or part in only]


def _as_dict(result: Any) -> dict[str, Any]:
    from lightning_liger.bench.advice import advice

    return {**result.to_dict(), "advice": advice(result)}


def _write(results: list[Any], folder: Path) -> None:
    from lightning_liger.bench.picture import save_picture
    from lightning_liger.bench.showing import show

    folder.mkdir(parents=True, exist_ok=True)
    numbers = json.dumps([_as_dict(r) for r in results], indent=2)
    (folder / "bench.json").write_text(numbers + "\n", encoding="utf-8")
    (folder / "bench.txt").write_text("\n\n\n".join(map(show, results)) + "\n", encoding="utf-8")
    try:
        save_picture(results, folder / "bench.png")
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
