"""The kernel of the optimizer's step: what PyTorch's operators give, for any mixture of tensors, and inside of a Trainer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import Plain, causal_lm, fit, loader
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from lightning_liger import LigerCallback
from lightning_liger.optim import kernel
from lightning_liger.optim.adamw import FusedStep, fused_step_of
from lightning_liger.optim.trial import kernel_fails

CPU = torch.device("cpu")
# one entry, less than a block, a block, a chunk and its neighbours, two chunks and a bit
SIZES = [1, 7, kernel.BLOCK, kernel.CHUNK - 1, kernel.CHUNK, kernel.CHUNK + 1, 2 * kernel.CHUNK + 100]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
    shifted = torch.randn(3001, generator=generator).to(dtype)[1:]  # an address that is no multiple of 16
    transposed = torch.randn(20, 30, generator=generator).to(dtype).t()
    images = torch.randn(4, 3, 5, 5, generator=generator).to(dtype, memory_format=torch.channels_last)
    return [
        *made,
        nn.Parameter(shifted),
        nn.Parameter(transposed),
        nn.Parameter(images),
        nn.Parameter(torch.empty(0, 4, dtype=dtype)),
    ]


def train(
    kind: Any, dtype: torch.dtype, state: torch.dtype | None, by_kernel: bool, clip: float = 0.0, **options: Any
) -> tuple[list[nn.Parameter], Any, list[float]]:
    of = parameters(dtype)
    optimizer = kind(
        [{"params": of[:4]}, {"params": of[4:], "lr": 1e-2, "weight_decay": 0.1}], **copy.deepcopy(options)
    )
    step = FusedStep(optimizer, state, kernel=by_kernel)
    generator, norms = torch.Generator().manual_seed(1), []
    for turn in range(4):
        for i, p in enumerate(of):
            gradient = torch.randn(p.shape, generator=generator).to(dtype)
            p.grad = None if (i + turn) % 5 == 0 else gradient
        if clip:
            norms.append(float(step.clip(clip, leave_clipped=turn % 2 == 0)))
        optimizer.step()
    return of, optimizer, norms


CASES: list[dict[str, Any]] = [{}, {"maximize": True}, {"lr": torch.tensor(1e-3)}, {"clip": 1.0}]


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("options", CASES)
def test_fp32_state(kind: Any, options: dict[str, Any]) -> None:
    expected, reference, norms = train(kind, torch.float32, None, False, **options)
    found, optimizer, own = train(kind, torch.float32, None, True, **options)
    assert own == pytest.approx(norms, rel=1e-6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-7)
        for name, value in reference.state[b].items():
            torch.testing.assert_close(optimizer.state[a][name], value, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CASES[:3])
def test_bf16_state_is_rounded_by_the_same_noise(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """An entry of which the last bit differed before it was rounded may go to the other neighbour; few do."""
    expected, reference, _ = train(AdamW, dtype, torch.bfloat16, False, **options)
    found, optimizer, _ = train(AdamW, dtype, torch.bfloat16, True, **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-4)
        for name in ("exp_avg", "exp_avg_sq") if reference.state[b] else ():
            x, y = optimizer.state[a][name], reference.state[b][name]
            assert x.dtype == y.dtype == torch.bfloat16
            assert (x != y).sum() <= 2 + 1e-3 * x.numel()
            assert (x.double() - y.double()).norm() <= 1e-3 * y.double().norm()


def test_no_gradient_at_all_and_nan() -> None:
    of = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))]
    step = FusedStep(optimizer := AdamW(of), torch.bfloat16, kernel=True)
    optimizer.step()
    assert not optimizer.state
    assert float(step.clip(1.0, leave_clipped=True)) == 0.0
    of[0].grad = torch.tensor([1.0, float("nan"), 1.0, float("inf"), 1.0])
    optimizer.step()
    state = optimizer.state[of[0]]
    assert state["exp_avg"].isnan().tolist() == [False, True, False, False, False]
    assert state["exp_avg_sq"].float()[3] == float("inf") and of[0].isnan()[1] and (of[1] == 1).all()


def test_the_trial_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert kernel_fails(CPU, dtype, torch.bfloat16) == ""
    assert kernel_fails(CPU, torch.float32, torch.float32) == ""
    real = kernel.adam

    def wrong(*args: Any, **options: Any) -> None:
        real(*args, **{**options, "factor": None})

    monkeypatch.setattr(kernel, "adam", wrong)
    kernel_fails.cache_clear()
    assert "is off by" in kernel_fails(CPU, torch.float32, torch.float32)
    monkeypatch.setattr(kernel, "adam", lambda *_, **__: 1 / 0)
    kernel_fails.cache_clear()
    assert "does not run (ZeroDivisionError" in kernel_fails(CPU, torch.float32, torch.bfloat16)
    optimizer = AdamW([nn.Parameter(torch.ones(3))])
    from lightning_liger.optim.report import OptimizerReport
    from lightning_liger.optim.taking import take_over

    take_over([optimizer], "bf16", "auto", report := OptimizerReport(), sharded=False)
    step = fused_step_of(optimizer)
    assert step is not None and not step.kernel and "ZeroDivisionError" in report.reasons()[0]
    kernel_fails.cache_clear()


class WithAdamW(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def test_through_a_trainer() -> None:
    """Clipped and accumulated, beside plain training: only the rounding of moments is between them."""
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_steps": 2}
    callback = LigerCallback(optimizer_state_dtype="bf16", kernels=False, verbose=False, verify="off")
    plain = fit(WithAdamW(causal_lm()), loader(), None, **options)
    found = fit(WithAdamW(causal_lm()), loader(), callback, **options)
    report = callback.report.optimizer
    assert report.by == "Triton" and report.applied == 1 and "clipping included" in report.rows()[0][2]
    assert found.losses == pytest.approx(plain.losses, rel=1e-3)
    for name, value in plain.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=0, atol=1e-4)


def test_gradients_of_any_layout() -> None:
    stored = {"step": torch.tensor(2.0), "exp_avg": torch.arange(24.0).view(4, 6), "exp_avg_sq": torch.ones(4, 6)}

    def step(by_kernel: bool) -> list[Tensor]:
        of = [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4).t())]
        optimizer = AdamW(of, lr=0.1, eps=1e-3)
        fused = FusedStep(optimizer, None, kernel=by_kernel)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {1: stored}})
        of[0].grad, of[1].grad = torch.arange(24.0).view(4, 6).t(), torch.arange(24.0).view(4, 6)
        fused.clip(1.0, leave_clipped=True)
        optimizer.step()
        kinds = [tables is not None for _, _, tables in fused._places]
        assert kinds == [by_kernel] and optimizer.state[of[1]]["exp_avg"].stride() == of[1].stride()
        return [t.detach() for p in of for t in (p, p.grad)]  # type: ignore[union-attr]

    for a, b in zip(step(True), step(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
