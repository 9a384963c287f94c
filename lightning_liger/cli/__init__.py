"""The ``lightning-liger`` command: a table of subcommands, each with a ``main(argv)`` in a module of its own."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_liger.cli.errors import CommandError

PROGRAM = "lightning-liger"
_TRAINING = "lightning_liger.cli.training"


@dataclass(frozen=True)
class Subcommand:
    """Where a subcommand is. Its module is imported when it is called, so that ``--help`` stays quick.

    Attributes:
        module: holds ``main(argv: list[str]) -> int``, which is given what follows the subcommand's name, and answers
            with the exit code: 0 for success, 1 for a problem that was found, 2 for a command line that is wrong.
        help: one line.
        named: the subcommand's name stays at the head of what ``main`` is given, for modules of several.
    """

    module: str
    help: str
    named: bool = False


COMMANDS: dict[str, Subcommand] = {
    "fit": Subcommand(_TRAINING, "train from a YAML file or options, as LightningCLI does, accelerated", named=True),
    "validate": Subcommand(_TRAINING, "evaluate on the validation data, configured like fit", named=True),
    "test": Subcommand(_TRAINING, "evaluate on the test data, configured like fit", named=True),
    "predict": Subcommand(_TRAINING, "predict, configured like fit", named=True),
    "inspect": Subcommand(
        "lightning_liger.cli.inspect", "show what would be accelerated in a model, without training it"
    ),
    "doctor": Subcommand("lightning_liger.cli.doctor", "check packages, devices and drivers, with remedies"),
    "bench": Subcommand("lightning_liger.cli.bench", "measure what each feature is worth on your module and data"),
    "export": Subcommand("lightning_liger.cli.export", "write a Hugging Face model from a Lightning checkpoint"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, without the program's name; ``sys.argv`` if it is left out. The exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(usage(), file=sys.stderr)
        return 2
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        import lightning_liger

        print(f"{PROGRAM} {lightning_liger.__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"{PROGRAM}: error: no subcommand {name!r}.{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    try:
        code: int = importlib.import_module(command.module).main(arguments if command.named else rest)
    except CommandError as error:
        print(f"{PROGRAM} {name}: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130
    return code


def usage() -> str:
    """What ``lightning-liger --help`` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [options]",
            "",
            "Accelerates unmodified LightningModules, and shows what that is worth.",
            "",
            "commands:",
            *lines,
            "",
            f"`{PROGRAM} COMMAND --help` lists the options of one; `{PROGRAM} --version` says which version this is.",
        ]
    )
