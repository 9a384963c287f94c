"""One step of a model as it is and accelerated, compared in double precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.accelerate import accelerate
from lightning_liger.report import PaddingReport
from lightning_liger.settings import Settings

VOCAB = 97
PAD = 1
Step = Callable[[Any, dict[str, Tensor]], Tensor]


def batch(
    lengths: tuple[int, ...] = (7, 12, 4), *, left: bool = False, seed: int = 0, to: int = 0
) -> dict[str, Tensor]:
    """Padded ``input_ids``, ``attention_mask`` and ``labels``; labels are ignored at padding and at first tokens."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(*lengths, to)
    ids = torch.full((len(lengths), longest), PAD)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, length in enumerate(lengths):
        start = longest - length if left else 0
        ids[row, start : start + length] = torch.randint(2, VOCAB, (length,), generator=generator)
        mask[row, start : start + length] = 1
        labels[row, start + 1 : start + length] = ids[row, start + 1 : start + length]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def with_labels(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).loss


def gradients(model: nn.Module, step: Step, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = step(model, inputs)
    loss.backward()
    return loss.detach().clone(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def sharpened(model: nn.Module) -> Any:
    """In double precision, with weights that make attention care about what it attends to."""
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    return model.train()


def compare(model: Any, step: Step, *batches: dict[str, Tensor], settings: Settings | None = None) -> PaddingReport:
    """Assert that loss and gradients agree on every batch; the accelerated model's report for more."""
    double = next(model.parameters()).dtype == torch.float64
    tolerance = 1e-6 if double else 1e-5  # of the loss, whose arithmetic is single
    plain = copy.deepcopy(model)
    handle = accelerate(model, settings)
    for inputs in batches:
        expected, expected_gradients = gradients(plain, step, dict(inputs))
        loss, found = gradients(model, step, dict(inputs))
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
        assert found.keys() == expected_gradients.keys()
        scale = max(float(g.abs().max()) for g in expected_gradients.values())
        for name, gradient in found.items():
            torch.testing.assert_close(
                gradient,
                expected_gradients[name],
                rtol=10 * tolerance,
                atol=tolerance * scale,
                msg=lambda m, n=name: f"{n}: {m}",
            )
    return handle.report.padding


def all_packed(report: PaddingReport) -> bool:
    return report.packed_calls == report.calls > 0 and report.padded_runs == 0
