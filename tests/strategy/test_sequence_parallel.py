"""``sequence_parallel_size``: four processes in one launch, and what needs no second process."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers import QUIET, causal_lm
from lightning.pytorch.cli import LightningCLI
from test_two_processes import HERE, TORCHRUN, environment
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_liger import LigerCallback, LigerFSDPStrategy
from lightning_liger.parallel.activations import Activations
from lightning_liger.parallel.divisible import larger_sizes
from lightning_liger.parallel.memory_plan import MemoryPlan, State
from lightning_liger.parallel.mesh import check_sizes
from lightning_liger.parallel.planning import Batch
from lightning_liger.parallel.same_batch import fingerprint
from lightning_liger.parallel.user_samplers import divide_by_groups


@pytest.mark.timeout(420)
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_groups_train_as_one_process(accelerator: str) -> None:
    # some 80 trainings by four processes that share two cores, in one launch: a minute on an idle machine
    processes = 4 if accelerator == "cpu" else min(4, torch.cuda.device_count() // 2 * 2)
    if not processes:
        pytest.skip("needs two CUDA devices, and takes four")
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={processes}", str(HERE / "sequence_worker.py")]
    done = subprocess.run(command, env=environment(accelerator), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    checked = [line for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert len(checked) >= int(done.stdout.split("cases: ")[1].split()[0]) > 8, done.stdout


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((8, 1, 3), r"sequence_parallel_size=3 does not divide the 8 processes.*Use one of 1, 2, 4, 8\."),
        (
            (8, 4, 4),
            r"sequence_parallel_size=4 does not divide the 2 processes.*replicate_size=4 of 8.*Use one of 1, 2",
        ),
        ((8, 3, 1), r"replicate_size=3 does not divide the 8 processes"),
    ],
)
def test_sizes_that_do_not_fit(sizes: tuple[int, int, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_sizes(*sizes)


@pytest.mark.parametrize("size", [0, -2, 1.5, "2", True])
def test_what_is_no_size(size: Any) -> None:
    with pytest.raises(ValueError, match=r"sequence_parallel_size=.*expected a positive integer, such as 2"):
        LigerFSDPStrategy(sequence_parallel_size=size)


def test_too_many_for_one_process_is_said_when_the_trainer_is_made() -> None:
    with pytest.raises(ValueError, match=r"sequence_parallel_size=2 does not divide the 1 processes"):
        L.Trainer(**{**QUIET, "strategy": LigerFSDPStrategy(sequence_parallel_size=2)})


@pytest.mark.parametrize(
    "name", ["sequence_parallel_size", "ulysses_sequence_parallel_size", "context_parallel_size", "sp_size"]
)
def test_the_callback_says_whose_option_it_is(name: str) -> None:
    with pytest.raises(TypeError, match=r"LigerFSDPStrategy\(sequence_parallel_size=2\)"):
        LigerCallback(**{name: 2})


def test_in_yaml(tmp_path: Any) -> None:
    (tmp_path / "c.yaml").write_text(
        "trainer:\n  accelerator: cpu\n  devices: 1\n  strategy:\n    class_path: lightning_liger.LigerFSDPStrategy\n"
        "    init_args:\n      sequence_parallel_size: 1\n"
    )
    cli = LightningCLI(
        L.LightningModule, run=False, args=["--config", str(tmp_path / "c.yaml")], save_config_callback=None
    )
    assert cli.trainer.strategy._sequence_parallel_size == 1


def test_equal_batches_have_equal_fingerprints() -> None:
    def batch(**changes: Any) -> dict[str, Any]:
        made = {
            "ids": torch.arange(12).view(3, 4),
            "text": ["a", "b"],
            "n": 2,
            "x": np.ones(3),
            "half": torch.ones(2).bfloat16(),
        }
        return {**made, **changes}

    assert fingerprint(batch()) == fingerprint(batch())
    others = [
        {"ids": torch.arange(12).view(4, 3)},
        {"ids": torch.arange(12).view(3, 4).int()},
        {"ids": torch.arange(12).flip(0).view(3, 4)},
        {"text": ["a", "c"]},
        {"n": 3},
        {"x": np.zeros(3)},
        {"half": torch.zeros(2).bfloat16()},
    ]
    assert len({fingerprint(batch(**other)) for other in others} | {fingerprint(batch())}) == len(others) + 1
    large = torch.zeros(3 * 2**18, dtype=torch.int64)
    last = large.clone()
    last[-1] = 1
    assert fingerprint(large) != fingerprint(last)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_a_sampler_over_all_ranks_is_divided_by_groups(drop_last: bool, batched: bool) -> None:
    data: Any = list(range(21))
    sampler: Any = DistributedSampler(data, 4, 3, shuffle=False, drop_last=drop_last)
    loader: DataLoader[Any] = (
        DataLoader(data, batch_sampler=BatchSampler(sampler, 3, False))
        if batched
        else DataLoader(data, batch_size=3, sampler=sampler)
    )
    divide_by_groups(loader, 4, 3, num_replicas=2, rank=1)
    fresh: Any = DistributedSampler(data, 2, 1, shuffle=False, drop_last=drop_last)
    assert list(sampler) == list(fresh) and len(sampler) == len(fresh)
    other: Any = DistributedSampler(data, 2, 1, shuffle=False)
    divide_by_groups(DataLoader(data, sampler=other), 4, 3, num_replicas=2, rank=1)
    assert (other.num_replicas, other.rank) == (2, 1)


def test_a_slice_is_what_memory_is_planned_for() -> None:
    assert Batch((2, 10), 15, 7).slice_of(2) == Batch((2, 10), 8, 4)


def test_a_batch_that_is_too_long_is_told_to_be_divided() -> None:
    state = State(
        parameters=0, gradients=0, optimizer=0, root=0, block=0, blocks=0, root_gradients=0, reduced=0, ranks=8
    )
    kept = Activations(blocks=10, block=3 * 2**30, entry=2**30, tokens=1_000)
    plan = MemoryPlan(state, kept, head=0, tokens=1_000, capacity=12 * 2**30, slices=2, divisible=(4, 8))
    assert "sequence_parallel_size=8" in plan.remedies() and "sequence_parallel_size=4" not in plan.remedies()
    assert not any("sequence" in text for text in replace(plan, divisible=()).remedies())


def test_sizes_that_divide_heads_and_ranks() -> None:
    module = torch.nn.ModuleDict({"model": causal_lm("llama")})  # four heads, two of keys and values
    assert (
        larger_sizes(module, 1, 8) == (2, 4) and larger_sizes(module, 2, 6) == () and larger_sizes(module, 1, 1) == ()
    )
    assert larger_sizes(torch.nn.Linear(2, 2), 1, 8) == ()
