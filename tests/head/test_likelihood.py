"""Log-probabilities by the kernel of the cross entropy, under Triton's interpreter: what plain code gives."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lazy_cases import Case, case, close, gradients
from preference_losses import Loss, cpo, dpo, grpo, kto, selective_log_softmax_in_low_precision, simpo
from torch import Tensor

from lightning_liger.head.lazy import Head, LazyRows
from lightning_liger.head.readings import Habits

HERE = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not HERE, reason="run by test_under_the_interpreter")
BATCH, LENGTH, VOCAB = 4, 9, 37
IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 5 % VOCAB
LABELS = IDS.masked_fill(torch.arange(LENGTH) < 3, -100)


@pytest.mark.skipif(HERE or importlib.util.find_spec("triton") is None, reason="needs triton")
def test_under_the_interpreter() -> None:
    # the variable must be set before triton is imported, and must not reach the other tests
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


class Model:
    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, padded: bool = False) -> None:
        self.case: Case = case(batch=BATCH, length=LENGTH, width=8, vocab=VOCAB, seed=seed, dtype=dtype, padded=padded)
        self.habits = Habits()

    def logits(self) -> LazyRows:
        c = self.case
        return LazyRows.logits(
            c.lazy_hidden(), Head(c.weight, c.bias, c.weight.dtype, "triton", c.report, habits=self.habits)
        )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each launch of the kernel wrote gradients."""
    from lightning_liger.head import triton_cross_entropy as module

    found: list[bool] = []
    kernel = module.cross_entropy_in_place

    def counted(*args: object, **kwargs: object) -> Tensor:
        found.append(bool(kwargs["want_gradient"]))
        return kernel(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "cross_entropy_in_place", counted)
    return found


@interpreted
@pytest.mark.parametrize("loss", [dpo, kto, simpo, cpo, grpo], ids=lambda f: f.__name__)
def test_preference_losses(loss: Loss, launches: list[bool]) -> None:
    policy, reference = Model(), Model(2)
    expected = loss(policy.case.ordinary(), reference.case.ordinary(), IDS, LABELS)
    leaves = [*policy.case.leaves, *reference.case.leaves]
    wanted = gradients(expected, leaves)
    for _ in range(2):
        found = loss(policy.logits(), reference.logits(), IDS, LABELS)
        close(found, expected, 1e-5)
        for a, b in zip(gradients(found, leaves), wanted, strict=True):
            close(a, b, 1e-5)
    assert launches and policy.case.report.materialised_by == {}
    if loss is dpo:  # forward of both models, then one chunk of the policy's backward, each time
        assert [wrote for wrote, _ in groupby(launches)] == [False, True] * 2
        assert launches.count(False) == 2 * launches.count(True)


def logps(x: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, IDS[..., None])[..., 0]


@interpreted
@pytest.mark.parametrize("padded", [False, True])
def test_forms(padded: bool) -> None:
    """A tail, an index over positions, losses row by row, each alone."""
    model = Model(padded=padded)
    keep = torch.ones(BATCH, LENGTH, dtype=torch.bool) if model.case.mask is None else model.case.mask
    forms = [
        lambda x: logps(30 * torch.tanh(x / 30)),
        lambda x: x.flatten(0, 1).log_softmax(-1)[torch.arange(BATCH * LENGTH), IDS.flatten()].view(BATCH, LENGTH),
        lambda x: F.cross_entropy(x.transpose(1, 2), IDS, reduction="none", label_smoothing=0.1),
        lambda x: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), IDS.flatten(), reduction="none").view(BATCH, LENGTH),
        lambda x: selective_log_softmax_in_low_precision(x, IDS),
    ]
    for form in forms:
        expected, found = form(model.case.ordinary()), form(model.logits())
        assert found.dtype == expected.dtype
        pairs = zip(
            gradients((found.square() * keep).sum(), model.case.leaves),
            gradients((expected.square() * keep).sum(), model.case.leaves),
            strict=True,
        )
        close(found * keep, expected * keep, 1e-5)
        for a, b in pairs:
            close(a, b, 1e-5)
    assert model.case.plain.reads == []


@interpreted
def test_others_share_from_the_next_step_on(launches: list[bool]) -> None:
    model = Model()

    def loss(x: Tensor) -> Tensor:
        return logps(x).sum() + 0.1 * (x.softmax(-1) * x.log_softmax(-1)).sum()

    expected = loss(model.case.ordinary())
    wanted = gradients(expected, model.case.leaves)
    for step in range(3):
        if step:
            launches.clear()
        found = loss(model.logits())
        close(found, expected, 1e-5)
        for a, b in zip(gradients(found, model.case.leaves), wanted, strict=True):
            close(a, b, 1e-5)
        assert bool(launches) == (step == 0)


@interpreted
def test_gradients_of_gradients() -> None:
    model = Model()

    def penalty(x: Tensor) -> Tensor:
        loss = logps(x).square().mean()
        (g,) = torch.autograd.grad(loss, [model.case.weight], create_graph=True)
        return loss + g.square().sum()

    found, expected = penalty(model.logits()), penalty(model.case.ordinary())
    for a, b in zip(gradients(found, model.case.leaves), gradients(expected, model.case.leaves), strict=True):
        close(a, b, 1e-5)


@interpreted
def test_ids_outside_of_the_vocabulary() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        Model().logits().log_softmax(-1).gather(-1, torch.full((BATCH, LENGTH, 1), VOCAB))
