"""Whether a model's angles are what a kernel reads: one per pair, where the function's own code reads two."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.kernels.rotary_forms import Form


def angles_problem(forms: list[Form | None], rotaries: list[tuple[str, set[str]]]) -> str:
    """Why the angles of a model do not fit kernels that read one per pair, or ``""``.

    Args:
        forms: of one layer's rotary functions.
        rotaries: see :func:`repeated_angles`.
    """
    for form in forms:
        for name, repeats in rotaries:
            if form is not None and form.reads in ("halves", "neighbours") and form.reads not in repeats:
                return f"{name} does not repeat its angles in {form.reads}"
    return ""


def repeated_angles(model: nn.Module) -> list[tuple[str, set[str]]]:
    """How the modules that make ``(cos, sin)`` repeat each angle: in ``"halves"``, as ``"neighbours"``, or not."""
    found = []
    for rotary in model.modules():
        frequencies = getattr(rotary, "inv_freq", None)
        if not isinstance(frequencies, Tensor) or frequencies.dim() != 1 or frequencies.device.type == "meta":
            continue
        x = torch.zeros(1, 4, 8, device=frequencies.device)
        try:
            with torch.no_grad():
                cos, sin = rotary(x, torch.arange(4, device=frequencies.device)[None])
        except Exception:  # called in another way, so its result reaches other code than ours
            continue
        if cos.shape[-1] == 2 * frequencies.shape[0]:
            half = frequencies.shape[0]
            repeats = {
                "halves": all(torch.equal(t[..., :half], t[..., half:]) for t in (cos, sin)),
                "neighbours": all(torch.equal(t[..., 0::2], t[..., 1::2]) for t in (cos, sin)),
            }
            found.append((type(rotary).__name__, {name for name, holds in repeats.items() if holds}))
    return found
