"""Four processes, run by ``torchrun``: all cases that are imported here, or those that are named."""

from __future__ import annotations

import sys
import warnings

import sequence_batches  # noqa: F401
import sequence_equalities  # noqa: F401
import sequence_kinds  # noqa: F401
import sequence_options  # noqa: F401
import torch
import torch.distributed as dist
from cases import run_cases
from helpers import leave
from runs import ACCELERATOR, DEVICE
from sequence_runs import CASES


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if ACCELERATOR == "gpu":  # one group for all cases
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=DEVICE)
    run_cases(CASES, names)


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
