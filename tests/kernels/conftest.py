"""Real Liger kernels on a CPU need ``TRITON_INTERPRET=1`` before Triton's first import, so they run in processes of their own."""

from __future__ import annotations

import os

# Collected only inside the processes that test_interpreted.py starts.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
