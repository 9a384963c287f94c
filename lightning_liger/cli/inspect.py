"""``lightning-liger inspect``: what would be accelerated in a model or module, without training it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from lightning_liger.cli.errors import CommandError
from lightning_liger.cli.models import described, make

DESCRIPTION = """\
Shows what would be accelerated in a model or LightningModule, and why the rest would not. Nothing is trained or
downloaded, and models are built without memory for their weights where that is possible.
"""

EPILOG = """\
TARGET is one of
  a checkpoint directory, or its config.json     of transformers
  a model type                                   such as llama, qwen2 or gemma2, at its default size
  file.py:Name or package.module:name            a LightningModule or nn.Module: a class, a function that makes one, or
                                                 an object

Exit codes: 0 something would be accelerated, 1 nothing would or the target cannot be built, 2 the command line is wrong.
"""


def parser() -> argparse.ArgumentParser:
    """The options, as ``--help`` shows them."""
    made = argparse.ArgumentParser(
        prog="lightning-liger inspect",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("target", metavar="TARGET", help="see below")
    add("--args", metavar="JSON", default="{}", help="""keyword arguments of the class or function: '{"lr": 1e-4}'""")
    add("--option", metavar="NAME=VALUE", action="append", default=[], help="of LigerCallback, such as kernels=true")
    add("--trust-remote-code", action="store_true", help="run code of the checkpoint's own")
    add("--json", action="store_true", help="print the report as JSON")
    return made


def main(argv: list[str]) -> int:
    """Run the subcommand; the exit code."""
    given = parser().parse_args(argv)
    options, arguments = _options(given.option), _arguments(given.args)
    from lightning_liger.accelerate import accelerate
    from lightning_liger.settings import Settings, check_option_names

    try:
        check_option_names(options)
        settings = Settings(**{**options, "verbose": False})
    except (TypeError, ValueError) as error:
        raise CommandError(f"--option: {error}") from error
    module, notes = make(given.target, arguments, given.trust_remote_code)
    try:
        accelerated = accelerate(module, settings)
    except ValueError as error:
        raise CommandError(f"{given.target}: {error}", code=1) from error
    report = accelerated.report
    for note in notes:
        report.note(note)
    what = described(module)
    if given.json:
        print(json.dumps({"target": given.target, **what, "report": report.to_dict()}, indent=2, default=str))
    else:
        print(_shown(given.target, what, report))
    nothing = report.nothing_to_accelerate
    accelerated.revert()
    return 1 if nothing else 0


def _shown(target: str, what: dict[str, Any], report: Any) -> str:
    from lightning_liger.printing import printable, table

    size = what["parameters"]
    count = f"{size / 1e6:,.1f} M" if size >= 1e6 else f"{size:,}"
    lines = [f"{target}: {what['class']}, {count} parameters"]
    if report.nothing_to_accelerate:
        lines.append("Nothing would be accelerated; everything would run as it is.")
    else:
        lines.append(table(("feature", "would be applied to"), [row[:2] for row in report.rows()]))
    reasons = report.reasons()
    if report.kernels.off:
        reasons.append(f"Kernels: {report.kernels.off}")
    if reasons:
        lines += ["", "What would stay as it is, and why:", *(f"  - {reason}" for reason in reasons)]
    elif report.nothing_to_accelerate:
        lines.append("No transformers model, no decoder in plain PyTorch and no language-model head was found.")
    return printable("\n".join(lines))


def _options(given: list[str]) -> dict[str, Any]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise CommandError(f"--option {text}: expected NAME=VALUE, such as kernels=true.")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise CommandError(f"--args {text}: no JSON ({error}).") from error
    if not isinstance(found, dict):
        raise CommandError(f"--args {text}: expected an object of keyword arguments, such as '{{\"lr\": 1e-4}}'.")
    return found
