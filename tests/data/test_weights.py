"""The mean over tokens: ranks and micro-batches of very different lengths train like one big batch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import QUIET, Plain, causal_lm, loader
from torch import Tensor
from weights_worker import Labels, accumulated, distance, one_big_batch

from lightning_liger import LigerCallback

HERE = Path(__file__).parent


def in_two_processes(script: str) -> list[str]:
    """Lines of the form ``case: difference``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [str(HERE), str(HERE.parent), *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*command, str(HERE / script)], env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [line for line in done.stdout.splitlines() if re.fullmatch(r"[\w ,]+: [\d.e+-]+", line)]


# two processes have to start; five comparisons share them
def test_two_ranks_three_micro_batches() -> None:
    assert len(in_two_processes("weights_worker.py")) == 5


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_two_ranks_three_micro_batches_under_deepspeed() -> None:
    assert len(in_two_processes("zero_weights_worker.py")) == 9


def test_one_process_accumulates_tokens() -> None:
    assert distance(accumulated(Labels(), lambda: "auto", "tokens", 0.5), one_big_batch(0.5)) < 1e-5


class Penalised(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss + 0.1 * self.model.lm_head.weight.square().mean()
        return loss


def test_other_losses_are_left_alone_and_said() -> None:
    runs = []
    for normalization in ("batch", "tokens"):
        module = Penalised(causal_lm("llama"))
        callback = LigerCallback(verbose=False, loss_normalization=normalization)
        L.Trainer(callbacks=[callback], accumulate_grad_batches=2, **QUIET).fit(module, loader())
        runs.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(runs[0], runs[1])
    assert "loss_normalization='tokens': the loss is no plain mean" in callback.report.render()


class Two(Plain):
    def __init__(self) -> None:
        super().__init__(causal_lm("llama"))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("must be refused before")

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[:1], 0.1), torch.optim.SGD(parameters[1:], 0.1)]


def test_refused_before_training() -> None:
    trainer = partial(L.Trainer, **QUIET)
    with pytest.raises(ValueError, match="which of 2 optimizers"):
        trainer(callbacks=[LigerCallback(loss_normalization="tokens")]).fit(Two(), loader())
    with pytest.raises(ValueError, match="loss_normalization='tokens' counts labels in the fused head"):
        LigerCallback(loss_normalization="tokens", fused_head=False)
