"""Four processes, run by ``torchrun``: all cases that are imported here, or those that are named."""

from __future__ import annotations

import sys
import time
import traceback
import warnings

import sequence_batches  # noqa: F401
import sequence_equalities  # noqa: F401
import sequence_kinds  # noqa: F401
import sequence_options  # noqa: F401
import torch
import torch.distributed as dist
from helpers import leave
from runs import ACCELERATOR, DEVICE, RANK
from sequence_runs import CASES


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if ACCELERATOR == "gpu":  # one group for all cases
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=DEVICE)
    failed = []
    for name in names or CASES:
        began = time.perf_counter()
        try:
            CASES[name]()
            if RANK == 0:
                print(f"took {time.perf_counter() - began:.1f} s: {name}", flush=True)
        except Exception:
            failed.append(name)
            print(f"FAILED {name} on rank {RANK}\n{''.join(traceback.format_exc().splitlines(True)[-12:])}", flush=True)
    if RANK == 0:
        print(f"cases: {len(names or CASES)}", flush=True)
    dist.destroy_process_group()
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
