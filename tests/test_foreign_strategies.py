"""Strategies that keep parameters in pieces: what cannot be right there is off, with the reason in the report."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import Plain, assert_same, both, causal_lm, fit, loader
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy

from lightning_liger import LigerCallback, Settings
from lightning_liger.foreign_strategies import fit_to_strategy


def test_an_ordinary_strategy_changes_nothing() -> None:
    settings = Settings()
    assert fit_to_strategy(SingleDeviceStrategy("cpu"), settings) == (settings, [])


def test_the_head_is_not_fused_under_fsdp1() -> None:
    settings, notes = fit_to_strategy(FSDPStrategy(), Settings())
    assert not settings.fused_head and settings.padding_free
    assert len(notes) == 1 and "FSDP1" in notes[0] and "liger_fsdp" in notes[0]
    assert fit_to_strategy(FSDPStrategy(), Settings(fused_head=False)) == (Settings(fused_head=False), [])


@pytest.mark.parametrize("stage", [2, 3])
def test_the_head_is_fused_under_zero(stage: int) -> None:
    # DeepSpeed itself needs CUDA to be made by Lightning; tests/head/zero_worker.py runs its engine
    strategy = type("DeepSpeedStrategy", (), {"zero_stage_3": stage == 3})()
    assert fit_to_strategy(strategy, Settings()) == (Settings(), [])


def test_the_reason_reaches_the_report() -> None:
    class FSDPStrategyLike(SingleDeviceStrategy):
        pass

    FSDPStrategyLike.__name__ = "FSDPStrategy"

    def strategy() -> Any:
        return FSDPStrategyLike("cpu")

    plain, ours = both(lambda: Plain(causal_lm()), loader, strategy=strategy(), accelerator="auto", devices="auto")
    assert_same(plain, ours)
    assert ours.report["fused_head"]["fused_calls"] == 0
    assert any("FSDP1" in note for note in ours.report["notes"])
    assert ours.report["padding_free"]["packed_calls"] > 0


class _FSDP(SingleDeviceStrategy):
    """Known by its name, as the real one (which wants CUDA) is."""


_FSDP.__name__ = "FSDPStrategy"


class _OwnClipping(Plain):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
@pytest.mark.parametrize("kind", [Plain, _OwnClipping])
def test_clipping_by_norm_is_refused_under_fsdp1(algorithm: str | None, kind: Any) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm, "max_steps": 1}
    options |= {"strategy": _FSDP("cpu"), "accelerator": "auto", "devices": "auto"}
    module = kind(causal_lm())
    if algorithm == "value" or kind is _OwnClipping:
        fit(module, loader(), LigerCallback(verbose=False), **options)
        return
    with pytest.raises(ValueError, match=r"gradient_clip_val=0\.5.*FSDPStrategy.*liger_fsdp"):
        fit(module, loader(), LigerCallback(verbose=False), **options)
    assert module.trainer.global_step == 0
