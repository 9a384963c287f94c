"""Where in the user's code something was asked for."""

from __future__ import annotations

import sys
import traceback


def call_site() -> str:
    """``file:line`` of the user's code: the innermost frame outside of torch and this package."""
    own = ("/lightning_liger/", "/torch/")
    for frame in reversed(traceback.extract_stack(sys._getframe(1))):
        path = frame.filename.replace("\\", "/")
        if not any(part in path for part in own):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"
