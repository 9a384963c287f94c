"""A worker's named cases, one after the other; a process that ``torchrun`` started."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist


def run_cases(cases: Mapping[str, Callable[[], Any]], names: Sequence[str]) -> None:
    """Run those that are named, or all; what one returns stands behind its ``ok``.

    Raises:
        SystemExit: some failed; each has said why.
    """
    rank, failed = int(os.environ.get("RANK", 0)), []
    for name in names or cases:
        began = time.perf_counter()
        try:
            said = cases[name]()
            took = f"{time.perf_counter() - began:.1f} s"
            if rank == 0:
                print(f"took {took}: {name}" if said is None else f"ok {name}: {said} ({took})", flush=True)
        except Exception:
            failed.append(name)
            print(f"FAILED {name} on rank {rank}\n{''.join(traceback.format_exc().splitlines(True)[-14:])}", flush=True)
    if rank == 0:
        print(f"cases: {len(names or cases)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    if failed:
        sys.exit(f"failed: {failed}")
