"""Measurements in processes of their own: what they see, and what becomes of those that fail."""

from __future__ import annotations

import subprocess
import sys

import jobs
import pytest
import torch

from lightning_liger.bench.batches import contents, whole_numbers
from lightning_liger.bench.job import Job, NoJob, as_job
from lightning_liger.bench.measuring import measure
from lightning_liger.bench.messages import Plan
from lightning_liger.bench.schedule import IN_ROUNDS, SIDE_BY_SIDE
from lightning_liger.bench.showing import show
from lightning_liger.bench.work import Work


def test_variants_take_turns_on_the_same_batches() -> None:
    lines: list[str] = []
    plan = Plan(warmup=2, steps=1, turns=2)
    result = measure(
        jobs.ordinary, plan=plan, features=("kernels", "padding", "batches"), order=SIDE_BY_SIDE, tell=lines.append
    )
    assert result.problems() == []
    plain, kernels, packed, batches = result.rows
    assert "need a CUDA device" in kernels.failure and not kernels.measured
    # two batches of four are one optimizer step, and one epoch
    tokens, positions = sum(jobs.LENGTHS), 4 * 23 + 4 * 29
    assert [t.tokens for t in plain.turns] == [(tokens,)] * 2 and plain.warm_ups[0].positions == (positions,) * 2
    assert plain.padding == pytest.approx(1 - tokens / positions)
    assert plain.largest == 4 * 29
    assert result.same_batches(packed) and 0 <= (result.deviation(packed) or 0.0) <= 1e-5
    assert len(packed.losses(0)) == plan.most_steps and packed.losses(0)[0] > packed.losses(0)[-1]
    assert packed.report["padding_free"]["applied"] == 1 and not packed.settings["fused_head"]
    assert batches.settings["max_tokens_per_batch"] == 4 * 29 and batches.settings["overlong"] == "own_batch"
    assert batches.report["token_batches"]["budget"] == 4 * 29
    assert sum(line.startswith("+padding-free: round") for line in lines) == 2
    text = show(result)
    assert "other batches" in text and "equal" in text and "each in a process of its own" in text


def test_what_processes_are_forked_from_leaves_the_cuda_driver_asleep() -> None:
    script = (
        "import torch\n"
        "def asked(*args, **kwargs): raise AssertionError('the driver was asked')\n"
        "for name in ('is_available', 'device_count', '_lazy_init'): setattr(torch.cuda, name, asked)\n"
        "import lightning_liger.bench.preload\n"
        "from lightning_liger.bench.driver import driver_asleep\n"
        "assert driver_asleep()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_what_fails_is_a_row() -> None:
    result = measure(
        jobs.plain_does_not_fit,
        plan=Plan(warmup=1, steps=2, turns=2),
        features=("head", "padding"),
        order=IN_ROUNDS,
    )
    plain, head, packed = result.rows
    assert plain.out_of_memory and not plain.measured
    assert head.measured and len(head.turns) == 2 and not head.failure
    assert packed.failure == "the process ended with exit code 3"
    assert result.problems() == ["+padding-free failed: the process ended with exit code 3"]
    text = show(result)
    assert "out of memory" in text and "the other variants went on without it" in text
    assert result.speedup(head) is None and result.deviation(head) is None


def test_what_a_build_function_may_return() -> None:
    module, data = jobs.Ordinary(), jobs.loader()
    assert as_job(module) == Job(module)
    job = as_job((module, data, {"precision": "bf16-mixed", "max_epochs": 9, "accelerator": None}))
    assert job.data is data and job.trainer_options == {"precision": "bf16-mixed"}
    with pytest.raises(NoJob, match=r"it returned \(Linear, DataLoader\)"):
        as_job(jobs.no_module())
    with pytest.raises(NoJob, match="trainer_options must be a dict"):
        as_job((module, data, "bf16"))


def test_operations_are_those_of_real_tokens_and_labels() -> None:
    module = jobs.Ordinary()
    batch = next(iter(jobs.loader()))
    work, held = Work(module), contents(whole_numbers(batch))
    layers = sum(p.numel() for n, p in module.model.model.layers.named_parameters() if "norm" not in n)
    pairs = sum(n * (n + 1) // 2 for n in jobs.LENGTHS[:4])
    assert held.tokens == sum(jobs.LENGTHS[:4]) and held.labels == held.tokens - 4
    attention = 2 * 3 * 4 * 32 * pairs  # layers, forward and backward, two products, width
    # the embedding trains, so that every product has both of its gradients
    expected = 6 * layers * held.tokens + attention + 6 * 32 * jobs.VOCAB * held.labels
    assert work.of([held, held]) == pytest.approx(2 * expected)
    assert Work(torch.nn.Linear(2, 2)).of([held]) is None


def test_the_callback_of_the_job_says_how_features_are_measured() -> None:
    from lightning_liger import LigerCallback

    job = Job(jobs.Ordinary(), None, {"callbacks": [LigerCallback(attention="sdpa", max_tokens_per_batch=64)]})
    assert job.options["attention"] == "sdpa" and job.options["max_tokens_per_batch"] == 64
