"""The ``kernels`` option: which values it may have, and what they mean for one op."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from lightning_liger.choices import KernelChoice


def check_choice(choice: object) -> None:
    """Raise for anything that is not a ``kernels`` option.

    Raises:
        ValueError: naming the unknown op, the nearest known one and all that are valid.
    """
    if isinstance(choice, bool) or choice == "auto":
        return
    if not isinstance(choice, Mapping):
        raise ValueError(f"kernels={choice!r}: expected 'auto', True, False, or ops such as {{'rms_norm': False}}.")
    from lightning_liger.kernels.registry import known_ops

    valid = known_ops()
    for op, value in choice.items():
        if op not in valid:
            near = difflib.get_close_matches(str(op), valid, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"kernels={choice!r}: unknown op {op!r}.{hint} Valid ops: {', '.join(valid)}.")
        if not isinstance(value, bool) and value != "auto":
            raise ValueError(f"kernels={choice!r}: {op!r} must be True, False or 'auto'.")


def choice_for(choice: KernelChoice, op: str) -> bool | str:
    """True, False or ``"auto"`` for one op; an op that a mapping leaves out follows the default, ``"auto"``."""
    return choice.get(op, "auto") if isinstance(choice, Mapping) else choice


def why_off(choice: KernelChoice, op: str, auto: str) -> str:
    """Why ``op`` is off, or ``""``; ``auto`` is why the default leaves kernels off, or ``""``."""
    wanted = choice_for(choice, op)
    if wanted == "auto":
        return auto
    return "" if wanted else "switched off"
