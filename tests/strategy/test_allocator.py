"""When the caching allocator is asked to grow its segments, and that it does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lightning_liger.parallel.allocator import close_gaps


def test_where_there_is_no_such_allocator_nothing_happens() -> None:
    assert not close_gaps(0.99, torch.device("cpu"))


def test_the_interface_is_there() -> None:
    # private; a release without it must show here, not on somebody's machine
    assert callable(torch._C._accelerator_setAllocatorSettings)


_ASKED = """
import os, sys, torch
from lightning_liger.parallel.allocator import close_gaps
before = torch.ones(8 << 20, device="cuda")
found = close_gaps(float(sys.argv[1]), torch.device("cuda"))
after = torch.ones(64 << 20, device="cuda")
kinds = {s["address"]: s["is_expandable"] for s in torch.cuda.memory._snapshot()["segments"]}
holds = lambda t: next(e for s, e in sorted(kinds.items(), reverse=True) if s <= t.data_ptr())
print(found, holds(before), holds(after), float(before.sum() + after.sum()))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("share", "settings", "expected"),
    [
        (0.9, None, "True False True"),
        (0.5, None, "False False False"),
        (0.9, "expandable_segments:False", "False False"),
    ],
)
def test_segments_grow_when_a_step_needs_nearly_everything(share: float, settings: str | None, expected: str) -> None:
    environment = {n: v for n, v in os.environ.items() if not n.endswith("ALLOC_CONF")}
    if settings is not None:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = settings
    command = [sys.executable, "-c", _ASKED, str(share)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(expected), done.stdout + done.stderr[-2000:]
    assert done.stdout.split()[-1] == str(float(72 << 20))
