"""Two processes, run by ``torchrun``: every case that is imported here, those that are named, or the ``ESSENTIAL`` ones.

Over gloo on CPUs, or over NCCL on two GPUs with ``TEST_ACCELERATOR=gpu``.
"""

from __future__ import annotations

import sys
import warnings

import behaviours  # noqa: F401
import company_cases  # noqa: F401
import decoder_cases  # noqa: F401
import dtype_cases  # noqa: F401
import equalities  # noqa: F401
import long_cases  # noqa: F401
import odd_cases  # noqa: F401
import padded_reads  # noqa: F401
import torch
import torch.distributed as dist
from cases import run_cases
from helpers import leave
from runs import ACCELERATOR, CASES, DEVICE

# one of each kind that another backend or device could tell apart
ESSENTIAL = [
    "in_init_tied",
    "configure_model",
    "adapters",
    "manual_and_clipped",
    "accumulate_and_clip",
    "policy_and_reference",
    "on_the_module",
    "two_optimizers",
    "offload",
    "one_reduction_in_a_step",
    "evaluating_before_and_after",
    "calls_from_hooks_and_callbacks",
    "masters_are_fp32_and_compute_is_bf16",
    "bf16_errs_as_plain_bf16_does",
    "adam_is_fused_where_it_may_be",
    "training_again_after_an_exception",
]


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if ACCELERATOR == "gpu":  # one group for all cases, offloading among them
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=DEVICE)
    run_cases(CASES, ESSENTIAL if names == ["ESSENTIAL"] else names)


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
