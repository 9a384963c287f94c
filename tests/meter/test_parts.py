"""The parts of the meter: peaks, phases, smoothness, advice."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import Plain, causal_lm, fit, loader

from lightning_liger import LigerCallback
from lightning_liger.meter.advice import advice
from lightning_liger.meter.peaks import PEAKS, ceiling, known_peak
from lightning_liger.meter.phases import Step
from lightning_liger.meter.smoothness import Smoothness
from lightning_liger.meter.window import Ranks, Sums, rates


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("AMD Instinct MI250X/MI250", 191.5),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
        ("AMD Instinct MI355X", 2516.6),
        # other clocks, fewer units or a slice: not what the data sheet of the namesake says
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("NVIDIA H800", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peaks_by_the_names_of_drivers(name: str, bf16: float | None) -> None:
    peak = known_peak(name)
    assert (None if peak is None else peak.of(torch.bfloat16)) == bf16


def test_peaks_are_dense_ones() -> None:
    for name, peak in PEAKS.items():
        # everywhere, fp8 is twice as fast as bf16, and tf32 at most half; a sparse figure would break the pattern
        assert peak.fp8 is None or peak.fp8 == pytest.approx(2 * peak.bf16, rel=0.02), name
        assert peak.tf32 is None or peak.tf32 == pytest.approx(peak.bf16 / 2, rel=0.03), name
        assert peak.fp32 < peak.bf16


def test_a_peak_that_nobody_printed_is_measured() -> None:
    found = ceiling(torch.device("cpu"), torch.float32)
    assert found.measured and 1e-3 < found.tflops < 100
    assert "measured" in found.text


class Slow(Plain):
    """A training step of known length."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def _slow_loader(count: int, seconds: float) -> Any:
    """Batches that each take so long to come."""

    class Loader(torch.utils.data.DataLoader[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                time.sleep(seconds)
                yield batch

    data = loader(count=count)
    return Loader(data.dataset, batch_size=4, collate_fn=data.collate_fn)


def test_the_time_of_a_step(tmp_path: Any) -> None:
    slow = _slow_loader(24, 0.05)
    callback = LigerCallback(verbose=False)
    fit(Slow(causal_lm()), slow, callback, max_steps=6)
    metrics = callback.report.metrics
    shares = [metrics[f"liger/{n}_fraction"] for n in ("data_wait", "forward", "backward", "optimizer", "other")]
    assert sum(shares) == pytest.approx(1)
    # the first batch of an epoch is fetched before anybody can look
    assert shares[0] > 0.2 and shares[1] > 0.3
    assert metrics["liger/step_seconds"] > 0.1
    assert "liger/launch_bound_fraction" not in metrics, "nothing runs beside the host on a CPU"


def test_waiting_for_launches_takes_both_signs() -> None:
    step = Step({"backward": 1.0}, {"backward": 0.99}, caught_up=True)
    assert step.waited_for_launches
    assert not replace(step, caught_up=False).waited_for_launches
    assert not replace(step, host={"backward": 0.2}).waited_for_launches, "the host was read from, and waited itself"


def test_smoothness() -> None:
    smooth = Smoothness()
    values = [math.sin(i) for i in range(1500)]
    smooth.add(values)
    last = values[-1000:]
    mean = sum(last) / 1000
    assert smooth.deviation == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in last) / 1000))
    assert smooth.spikes == 0 and smooth.count == 1500
    smooth.add([9.0, float("nan"), float("inf"), 0.1])
    assert smooth.spikes == 3 and smooth.count == 1504
    flat = Smoothness()
    flat.add([1e6] * 50)
    assert flat.deviation == 0 and flat.spikes == 0


def test_rates_are_sums_over_the_slowest_ranks_time() -> None:
    total = Sums(seconds=5.0, steps=4, batches=4, tokens=300, positions=400, samples=12, model=9e12, hardware=12e12)
    most = Sums(seconds=3.0, steps=2, batches=2, tokens=200, positions=200, samples=8, model=6e12, hardware=8e12)
    made = rates(Ranks(2, total, most, {"ceiling": 6e12}, {"blind": 0.0}), budget=100)
    expected = {
        "step_seconds": 1.5,
        "tokens_per_second": 100.0,
        "samples_per_second": 4.0,
        "padding_fraction": 0.25,
        "fill_fraction": 0.75,
        "rank_imbalance": 6e12 / 4.5e12 - 1,
        "mfu": 0.5,
        "hfu": 12 / 18,
    }
    assert made == pytest.approx(expected)
    assert "mfu" not in rates(Ranks(2, total, most, {"ceiling": 6e12}, {"blind": 1.0}))


@pytest.mark.parametrize(
    ("window", "said"),
    [
        (Sums(timed=50, backward=3.0, launches=48, batches=50, tokens=200_000), "waits for Python: in 48 of 50"),
        (Sums(timed=50, backward=3.0, data=1.0, batches=50, tokens=200_000), "25% of the time (20 ms per batch)"),
        (Sums(timed=50, backward=3.0, launches=3, data=0.01, batches=50, tokens=200_000), None),
        (Sums(timed=10, backward=3.0, launches=10, batches=10, tokens=40_000), None),
    ],
)
def test_advice_has_the_numbers_that_it_follows_from(window: Sums, said: str | None) -> None:
    found = list(advice(window, imbalance=0.0, budget=0, could_compile=lambda: False, on_gpu=True))
    assert len(found) == (said is not None)
    if said is not None:
        assert said in found[0]
    uneven = list(advice(window, imbalance=0.5, budget=0, could_compile=lambda: False, on_gpu=False))
    assert any("keep_samples" in text for text in uneven) == (window.timed >= 20)


@pytest.mark.parametrize("could", [False, True])
def test_compilation_is_advised_where_the_user_turned_it_off(could: bool) -> None:
    window = Sums(timed=50, backward=3.0, launches=48, batches=50, tokens=200_000)
    (text,) = advice(window, imbalance=0.0, budget=0, could_compile=lambda: could, on_gpu=True)
    assert ("compile='auto'" in text) == could


def test_advice_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    slow = _slow_loader(160, 0.02)
    callback = LigerCallback()
    fit(Plain(causal_lm()), slow, callback, max_steps=40, log_every_n_steps=25, limit_train_batches=40)
    assert capsys.readouterr().out.count("waiting for data") == 1
    assert sum("waiting for data" in note for note in callback.report.notes) == 1
