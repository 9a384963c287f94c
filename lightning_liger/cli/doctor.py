"""``lightning-liger doctor``: is this installation and this machine fit, and if not, what to do."""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter

from lightning_liger.cli.checks import NOTE, OK, PROBLEM, Check, package_checks
from lightning_liger.cli.machine import machine_checks


def parser() -> argparse.ArgumentParser:
    """The options, as ``--help`` shows them."""
    made = argparse.ArgumentParser(
        prog="lightning-liger doctor",
        description="Looks at Python, packages, devices and drivers, and names what is known to go wrong, with a remedy.",
        epilog="Exit codes: 0 no problem (notes are none), 1 there is one.",
    )
    made.add_argument("--json", action="store_true", help="print the checks as JSON")
    return made


def main(argv: list[str]) -> int:
    """Run the subcommand; the exit code."""
    given = parser().parse_args(argv)
    checks = [*package_checks(), *machine_checks(), _attention()]
    problems = sum(check.status == PROBLEM for check in checks)
    if given.json:
        print(json.dumps({"problems": problems, "checks": [check.to_dict() for check in checks]}, indent=2))
    else:
        print(show(checks))
    return 1 if problems else 0


def show(checks: list[Check]) -> str:
    """The checks as text: a table, then remedies."""
    import lightning_liger
    from lightning_liger.printing import printable, table

    counts = Counter(check.status for check in checks)
    title = f"lightning-liger {lightning_liger.__version__} on {platform.system()} {platform.machine()}"
    rows = [(check.name, check.status, check.found) for check in checks]
    lines = [title, table(("looked at", "status", "found"), rows)]
    for status, heading in ((PROBLEM, "What to do"), (NOTE, "Worth knowing")):
        found = [check for check in checks if check.status == status]
        if found:
            lines += ["", f"{heading}:", *(f"  - {check.name}: {check.remedy}" for check in found)]
    lines += ["", f"{counts[PROBLEM]} problems, {counts[NOTE]} notes, {counts[OK]} fine."]
    return printable("\n".join(lines))


def _attention() -> Check:
    """Which ways of attending inside of documents there are here."""
    from lightning_liger.padding.backends.registry import BACKENDS

    found = [backend.name for backend in BACKENDS if not backend.unavailable()]
    return Check("attention without padding", OK, ", ".join(found))
