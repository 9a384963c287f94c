"""Two processes, run by ``torchrun``: every case that is imported here, or those that are named.

Over gloo on CPUs, or over NCCL on two GPUs with ``TEST_ACCELERATOR=gpu``.
"""

from __future__ import annotations

import sys
import traceback
import warnings

import behaviours  # noqa: F401
import dtype_cases  # noqa: F401
import equalities  # noqa: F401
import odd_cases  # noqa: F401
import torch
import torch.distributed as dist
from helpers import leave
from runs import CASES, RANK


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    failed = []
    for name in names or CASES:
        try:
            CASES[name]()
        except Exception:
            failed.append(name)
            if RANK == 0:
                print(f"FAILED {name}\n{''.join(traceback.format_exc().splitlines(True)[-9:])}", flush=True)
    if RANK == 0:
        print(f"cases: {len(names or CASES)}", flush=True)
    dist.destroy_process_group()
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
