"""The step for all parameters at once, beside torch.optim's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from lightning_liger.optim.adamw import FusedStep, fused_step_of
from lightning_liger.optim.fitness import why_not
from lightning_liger.optim.report import OptimizerReport
from lightning_liger.optim.rounding import hashed, hashed_all, key_at, noise, to_bf16
from lightning_liger.optim.taking import state_bytes, take_over

SHAPES = [(3, 5), (7,), (33, 64), (), (40, 30), (2, 2, 3)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    made.append(torch.randn(6, 8, generator=generator).to(dtype).t())  # dense, not contiguous
    return [nn.Parameter(t) for t in made]


def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": of[:3], "lr": 1e-2}, {"params": of[3:], "weight_decay": 0.3, "betas": (0.8, 0.95)}]


def train(
    make: Callable[[Any], Any],
    prepare: Callable[[Any], Any] = lambda optimizer: None,
    steps: int = 6,
    dtype: torch.dtype = torch.float32,
    schedule: bool = False,
) -> tuple[list[nn.Parameter], Any]:
    of = parameters(dtype)
    optimizer = make(groups(of))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 5) if schedule else None
    prepare(optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for i, p in enumerate(of):
            gradient = torch.randn(p.shape, generator=generator).to(dtype)
            # one that is left out once, and one that comes late
            p.grad = None if (i, step) == (2, 3) or (i == 4 and step < 2) else gradient
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return of, optimizer


def at_once(state_dtype: torch.dtype | None = None) -> Callable[[Any], Any]:
    return lambda optimizer: FusedStep(optimizer, state_dtype, kernel=False)


OPTIONS: list[dict[str, Any]] = [{}, {"maximize": True}, {"weight_decay": 0.1, "lr": torch.tensor(1e-3)}, {"eps": 1e-3}]


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("options", OPTIONS)
def test_fp32_is_torchs_step_to_the_last_bit(kind: Any, options: dict[str, Any]) -> None:
    # schedulers write into a learning rate that is a tensor
    expected, reference = train(lambda g: kind(g, foreach=False, **copy.deepcopy(options)), schedule=True)
    found, optimizer = train(lambda g: kind(g, **copy.deepcopy(options)), at_once(), schedule=True)
    for a, b in zip(found, expected, strict=True):
        if "lr" in options:  # torch divides a learning rate that is a tensor in fp32
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            continue
        assert torch.equal(a, b)
        assert optimizer.state[a].keys() == reference.state[b].keys()
        for name, value in reference.state[b].items():
            assert torch.equal(optimizer.state[a][name], value) and optimizer.state[a][name].dtype == value.dtype
    assert optimizer.param_groups[1]["lr"] == reference.param_groups[1]["lr"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_state_stays_near(dtype: torch.dtype) -> None:
    expected, _ = train(lambda g: AdamW(g, foreach=False, lr=1e-2))
    found, optimizer = train(lambda g: AdamW(g, lr=1e-2), at_once(torch.bfloat16), dtype=dtype)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        # two steps' worth: what is stored is off by up to 2^-8 of itself, the weights (bf16) by as much
        assert (a.float() - b).abs().max() < (0.02 if dtype == torch.float32 else 0.05)
        assert optimizer.state[a]["exp_avg"].dtype == optimizer.state[a]["exp_avg_sq"].dtype == torch.bfloat16
        assert optimizer.state[a]["exp_avg"].stride() == a.stride()
    assert state_bytes(optimizer) == 4 * sum(p.numel() for p in found)


def test_the_same_numbers_again() -> None:
    """No random state is drawn from, and none has to be saved."""
    before = torch.get_rng_state()
    one, first = train(lambda g: AdamW(g), at_once(torch.bfloat16))
    assert torch.equal(torch.get_rng_state(), before)
    two, second = train(lambda g: AdamW(g), at_once(torch.bfloat16))
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b) and torch.equal(first.state[a]["exp_avg"], second.state[b]["exp_avg"])


def test_rounding_has_no_bias() -> None:
    """Over many steps the mean of a stored value is the value; its neighbours come up as often as their distances say."""
    values = torch.tensor([1.0 + 1 / 512, 1.0 + 1 / 2048, -3.3, 1e-20, 7e4, -1.2345e-6, 0.1])
    draws = 20_000
    sums = torch.zeros(len(values), dtype=torch.float64)
    for step in range(draws // 1000):
        for i, value in enumerate(values):
            bits = noise(key_at(hashed(i + 1), step + 1), 0, 1000, torch.device("cpu"))
            sums[i] += to_bf16(value.expand(1000), bits & 0xFFFF).double().sum()
            low, high = to_bf16(value, torch.tensor(0)), to_bf16(value, torch.tensor(0xFFFF))
            assert low.double().abs() <= value.double().abs() <= high.double().abs()
    mean = sums / draws
    spacing = values.double().abs().log2().floor().exp2() * 2**-7
    # a draw's deviation is at most half of the distance
    assert ((mean - values.double()).abs() / spacing < 4 * 0.5 / draws**0.5).all(), (mean - values.double()) / spacing


def test_both_halves_of_the_noise_are_fair_and_apart() -> None:
    bits = noise(key_at(hashed(3), 17), 0, 2**18, torch.device("cpu"))
    low, high = (bits & 0xFFFF).double(), (bits >> 16).double()
    for half in (low, high):
        assert abs(half.mean() / 65535 - 0.5) < 4 * 0.289 / 2**9
        for bit in range(16):
            assert abs(((half.long() >> bit) & 1).double().mean() - 0.5) < 4 * 0.5 / 2**9
    later = (noise(key_at(hashed(3), 18), 0, 2**18, torch.device("cpu")) & 0xFFFF).double()
    other = (noise(key_at(hashed(4), 17), 0, 2**18, torch.device("cpu")) & 0xFFFF).double()
    for a, b in ((low, high), (low, later), (low, other), (low[1:], low[:-1])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 4 / 2**9


def test_small_changes_are_not_lost() -> None:
    """Adam's second moment falls by a thousandth a step, less than bf16 tells apart: rounded to nearest, it never would."""
    p = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([p], lr=0.0)
    FusedStep(optimizer, torch.bfloat16, kernel=False)
    p.grad = torch.ones(4096)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"].fill_(1.0)
    p.grad = torch.zeros(4096)
    for _ in range(300):
        optimizer.step()
    assert optimizer.state[p]["exp_avg_sq"].double().mean().item() == pytest.approx(0.999**300, rel=2e-3)
    nearest = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(300):
        nearest.mul_(0.999)
    assert nearest.item() > 0.99


def test_what_is_no_number_stays_none() -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    values = torch.cat(
        [values, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)]
    )  # NaN as GPUs make it
    for random in (0, 0x8000, 0xFFFF):
        found = to_bf16(values, torch.full((6,), random)).float()
        assert found[0] == float("inf") and found[1] == float("-inf") and found[[2, 5]].isnan().all()
        assert (found[3:5] == 0).all()


def test_hashes_agree() -> None:
    inputs = torch.tensor([0, 1, 2**31, 2**32 - 1, 123456789])
    assert hashed_all(inputs).tolist() == [hashed(int(x)) for x in inputs]


# -- around the step ---------------------------------------------------------------------------------------------------


def test_hooks_closures_and_schedulers_see_an_ordinary_step(recwarn: pytest.WarningsRecorder) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p], lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # one that was made before
    FusedStep(optimizer, torch.bfloat16, kernel=False)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        seen.append("closure")
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 3.0  # type: ignore[arg-type]
    assert float(optimizer.step(closure=closure)) < 3.0
    after.step()
    assert seen == ["before", "closure", "after"] * 2
    assert not [w for w in recwarn if "optimizer.step" in str(w.message)]


def test_groups_that_come_later_and_parameters_that_move() -> None:
    of = parameters()
    optimizer, reference = AdamW(of[:2], lr=0.1), AdamW(copy.deepcopy(of[:2]), lr=0.1, foreach=False)
    FusedStep(optimizer, None, kernel=False)
    late = copy.deepcopy(of[2])
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [of[2]], "lr": 0.01})
            reference.add_param_group({"params": [late], "lr": 0.01})
            of[0].data = of[0].data.clone()
        for one in (optimizer, reference):
            for p in (p for group in one.param_groups for p in group["params"]):
                p.grad = torch.full_like(p, 0.5 - step)
            one.step()
    flat = [p for group in reference.param_groups for p in group["params"]]
    assert all(torch.equal(a, b) for a, b in zip(of[:3], flat, strict=True))


def test_versions_are_counted_for_autograd() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p])
    FusedStep(optimizer, torch.bfloat16, kernel=False)
    loss = (p**2).sum()
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_clipping_is_part_of_the_step() -> None:
    expected, found = parameters(), parameters()
    reference, optimizer = AdamW(expected, foreach=False), AdamW(found)
    step = FusedStep(optimizer, None, kernel=False)
    for leave in (True, False):
        for of in (expected, found):
            generator = torch.Generator().manual_seed(3)
            for p in of:
                p.grad = torch.randn(p.shape, generator=generator)
        norm = torch.nn.utils.clip_grad_norm_(expected, 1.0, foreach=False)
        assert step.clip(1.0, leave_clipped=leave).item() == pytest.approx(norm.item(), rel=1e-6)
        reference.step()
        optimizer.step()
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            if leave:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-7)
            else:
                assert a.grad is None
    # the factor was of that step alone
    for of in (expected, found):
        for p in of:
            p.grad = torch.ones_like(p)
    reference.step()
    optimizer.step()
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(found, expected, strict=True))


# -- saving and loading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_state_goes_both_ways(before: bool, after: bool) -> None:
    """As an ordinary file, between runs with the option and without."""
    of, optimizer = train(lambda g: AdamW(g, lr=1e-2), at_once(torch.bfloat16) if before else lambda o: None)
    saved = copy.deepcopy(optimizer.state_dict())
    dtypes = {v.dtype for entry in saved["state"].values() for k, v in entry.items() if k != "step"}
    assert dtypes == {torch.bfloat16 if before else torch.float32}
    own = [nn.Parameter(p.detach().clone()) for p in of]
    again = AdamW(groups(own), lr=1e-2)
    if after:
        FusedStep(again, torch.bfloat16, kernel=False)
    again.load_state_dict(saved)
    for p in own:
        for name in ("exp_avg", "exp_avg_sq"):
            assert again.state[p][name].dtype == (torch.bfloat16 if after else torch.float32)
    for of_one, one in ((of, optimizer), (own, again)):
        for p in of_one:
            p.grad = torch.full_like(p, 0.1)
        one.step()
        assert float(one.state[of_one[0]]["step"]) == 7.0
        assert float(one.state[of_one[2]]["step"]) == 6.0  # left out once
    for a, b in zip(own, of, strict=True):
        if before and after:
            assert torch.equal(a, b), "the same numbers as without the stop"
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_loading_makes_no_fp32_copies() -> None:
    of, optimizer = train(lambda g: AdamW(g), at_once(torch.bfloat16))
    saved = optimizer.state_dict()
    again = AdamW(groups(of))
    FusedStep(again, torch.bfloat16, kernel=False)
    made: list[tuple[torch.dtype, torch.Size]] = []
    real = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = real(self, *args, **kwargs)
        if result is not self:
            made.append((result.dtype, result.shape))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", to)
        again.load_state_dict(saved)
    assert all(shape == () for dtype, shape in made if dtype == torch.float32), made


# -- refusals ----------------------------------------------------------------------------------------------------------


class Mine(AdamW):
    """Somebody's own."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), r"torch\.optim\.sgd\.SGD computes another step"),
        (Mine, r"test_fused_step\.Mine computes another step"),
        (lambda p: AdamW(p, amsgrad=True), r"AdamW\(amsgrad=True\)"),
        (lambda p: Adam(p, capturable=True), r"Adam\(capturable=True\)"),
        (lambda p: AdamW(p, differentiable=True), r"AdamW\(differentiable=True\)"),
    ],
)
def test_others_are_refused_with_the_reason(make: Any, reason: str) -> None:
    optimizer = make([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match=rf"optimizer_state_dtype='bf16' is about AdamW, but {reason}.*Use torch"):
        take_over([optimizer], "bf16", "auto", OptimizerReport(), sharded=False)
    report = OptimizerReport()
    take_over([optimizer], None, True, report, sharded=False)
    assert fused_step_of(optimizer) is None and report.applied == 0 and len(report.off) == 1
    take_over([optimizer], None, "auto", report := OptimizerReport(), sharded=False)
    assert fused_step_of(optimizer) is None and not report.off


def test_dtypes_and_a_replaced_step_are_refused() -> None:
    assert "float16" in why_not(AdamW([nn.Parameter(torch.zeros(2, dtype=torch.float16))]), sharded=False)
    optimizer = AdamW([nn.Parameter(torch.zeros(2))])
    assert why_not(optimizer, sharded=False) == ""
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    assert "replaced" in why_not(optimizer, sharded=False)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_chosen_implementations_do_not_hinder_bf16_state(options: dict[str, Any]) -> None:
    optimizer = AdamW([nn.Parameter(torch.zeros(2))], **options)
    report = OptimizerReport()
    take_over([optimizer], "bf16", "auto", report, sharded=False)
    take_over([optimizer], "bf16", "auto", report, sharded=False)  # a second time changes nothing
    assert report.applied == 1 and report.state_dtype == "bf16" and report.bytes == 8
    assert "rounded stochastically" in report.rows()[0][2]
