"""A loss and the metrics of its logits compute their product once, and agree with plain code."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Plain, assert_same, causal_lm, fit, loader
from lazy_cases import Case, case, close, gradients
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_liger import LigerCallback
from lightning_liger.head.lazy import Head, LazyRows
from lightning_liger.head.readings import Habits

BATCH, LENGTH, VOCAB, WIDTH = 2, 12, 31, 16
IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 7 % VOCAB
BACKEND = os.environ.get("TEST_BACKEND", "torch")
# what Triton's interpreter and its kernels compute in
DTYPE, TOLERANCE = (torch.float32, 1e-5) if BACKEND == "triton" else (torch.float64, 1e-9)

Step = Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor]]]


class Model:
    """One head that is called again and again."""

    def __init__(self, padded: bool = False) -> None:
        self.case: Case = case(batch=BATCH, length=LENGTH, width=WIDTH, vocab=VOCAB, dtype=DTYPE, padded=padded)
        self.habits = Habits()

    def logits(self) -> LazyRows:
        c = self.case
        head = Head(c.weight, c.bias, DTYPE, BACKEND, c.report, habits=self.habits)
        return LazyRows.logits(c.lazy_hidden(), head)

    def labels(self, prompt: int) -> Tensor:
        """Neither a prompt nor padding counts."""
        kept = torch.arange(LENGTH) >= prompt
        kept = kept if self.case.mask is None else kept & self.case.mask
        return IDS.masked_fill(~kept, -100)


def accuracy(x: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    loss = F.cross_entropy(x.flatten(0, 1), labels.flatten())
    with torch.no_grad():
        right = (x.argmax(-1) == labels) & (labels != -100)
    return loss, [right.sum() / (labels != -100).sum()]


def shifted(x: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Other views of the same rows, detached, and several metrics."""
    x, labels = x[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(x.transpose(1, 2), labels, reduction="sum", label_smoothing=0.1)
    keep = labels != -100
    flat = x.detach().float().reshape(-1, VOCAB)
    best = flat.topk(3).indices.eq(labels.reshape(-1, 1)).any(-1)
    confidence, entropy = flat.softmax(-1).amax(-1), -(flat.softmax(-1) * flat.log_softmax(-1)).sum(-1)
    flags = keep.flatten()
    return loss, [m[flags].double().sum() for m in (best, confidence, entropy, flat.logsumexp(-1))]


def without_gradients(x: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    with torch.no_grad():
        return accuracy(x, labels)


STEPS: dict[str, Step] = {"accuracy": accuracy, "shifted": shifted, "validation": without_gradients}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("prompt", [0, 5])
@pytest.mark.parametrize("name", list(STEPS))
def test_the_same_every_time(name: str, prompt: int, padded: bool) -> None:
    model, step = Model(padded), STEPS[name]
    c, labels = model.case, model.labels(prompt)
    expected, metrics = step(c.ordinary(), labels)
    wanted = gradients(expected, c.leaves) if expected.requires_grad else []
    for _ in range(3):
        found, ours = step(model.logits(), labels)
        close(found, expected, TOLERANCE)
        for a, b in zip(ours, metrics, strict=True):
            close(a.double(), b.double(), max(TOLERANCE, 1e-6))
        assert found.requires_grad == expected.requires_grad
        for a, b in zip(gradients(found, c.leaves) if wanted else [], wanted, strict=True):
            close(a, b, TOLERANCE)
    assert c.report.materialised_by == {}


def flops(model: Model, step: Step, labels: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        loss, _ = step(model.logits(), labels)
        if loss.requires_grad:
            torch.autograd.grad(loss, model.case.leaves)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", list(STEPS))
def test_the_product_is_computed_once(name: str) -> None:
    """From the second step on; rows that the loss skips are the metric's own."""
    for prompt in (0, 5):
        model, alone = Model(), Model()
        labels, step = model.labels(prompt), STEPS[name]
        used = [flops(model, step, labels) for _ in range(3)]

        def loss_only(x: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
            with torch.set_grad_enabled(name != "validation"):
                x, labels = (x[:, :-1], labels[:, 1:]) if name == "shifted" else (x, labels)
                return F.cross_entropy(x.flatten(0, 1), labels.flatten()), []

        rows = BATCH * (prompt - (name == "shifted")) if prompt else 0
        readers = 4 if name == "shifted" else 1
        assert used[0] > used[1] == used[2]
        extra = used[2] - flops(alone, loss_only, labels)
        assert extra <= readers * rows * 2 * WIDTH * VOCAB
        if not prompt:
            assert extra == 0


def test_what_is_not_asked_for_any_more_is_forgotten() -> None:
    model = Model()
    labels = model.labels(0)
    for _ in range(2):
        accuracy(model.logits(), labels)
    assert any(model.habits.observed.values())
    F.cross_entropy(model.logits().flatten(0, 1), labels.flatten()).backward()
    assert not any(model.habits.observed.values())


@pytest.mark.skipif(
    BACKEND == "triton" or importlib.util.find_spec("triton") is None,
    reason="runs this file under Triton's interpreter",
)
def test_with_the_kernel_that_overwrites_its_logits() -> None:
    # the variable must be set before triton is imported, and must not reach the other tests
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TEST_BACKEND": "triton",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]


class WithAccuracy(Plain):
    """As people write it: a loss of their own, and the accuracy of what it was computed from."""

    def _loss(self, batch: Any, stage: str) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))
        with torch.no_grad():
            keep = labels != -100
            self.log(f"{stage}_accuracy", (logits.argmax(dim=-1) == labels)[keep].float().mean())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch, "val"))


@pytest.mark.skipif(BACKEND == "triton", reason="asks for no backend")
def test_in_a_trainer() -> None:
    runs = []
    for callback in (None, LigerCallback(verbose=False)):
        torch.manual_seed(0)
        runs.append(fit(WithAccuracy(causal_lm()), loader(), callback, val=loader(), limit_val_batches=2))
    plain, ours = runs
    assert_same(plain, ours)
    for name in ("train_accuracy", "val_accuracy", "val_loss"):
        assert ours.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-5)
    assert ours.report["fused_head"]["materialised_by"] == {}
