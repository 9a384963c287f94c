"""Training steps on a CUDA device that never wait for it: PyTorch raises wherever one would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import assert_engaged, causal_lm, fit, loader
from lightning.pytorch.strategies import SingleDeviceStrategy
from test_waiting import LOSSES, Loss, Step
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WARM_UP = 3  # kernels are compiled, memory is allocated


@contextmanager
def forbidden_to_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Guarded(SingleDeviceStrategy):
    """Forward with loss, and backward, may not wait once they are warm."""

    def __init__(self) -> None:
        super().__init__(device="cuda:0")
        self.guarded = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.lightning_module.global_step < WARM_UP:
            return super().training_step(*args, **kwargs)
        self.guarded += 1
        with forbidden_to_wait():
            return super().training_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        if self.lightning_module.global_step < WARM_UP:
            return super().backward(*args, **kwargs)
        with forbidden_to_wait():
            return super().backward(*args, **kwargs)


def _data(pin_memory: bool) -> DataLoader[Any]:
    made = loader(count=24)
    return DataLoader(made.dataset, batch_size=4, collate_fn=made.collate_fn, pin_memory=pin_memory)


def _train(loss: Loss, pin_memory: bool, callback: LigerCallback | None, strategy: Any, precision: str) -> Any:
    module = Step(loss)
    module.model = causal_lm(hidden_size=256, intermediate_size=256)
    return fit(
        module,
        _data(pin_memory),
        callback,
        strategy=strategy,
        accelerator="gpu" if isinstance(strategy, str) else "auto",
        max_steps=6,
        precision=precision,
    )


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_no_step_waits(loss: Loss, pin_memory: bool, precision: str) -> None:
    strategy = Guarded()
    ours = _train(loss, pin_memory, LigerCallback(verbose=False), strategy, precision)
    assert strategy.guarded == 6 - WARM_UP
    assert_engaged(ours)
    assert ours.report["fused_head"]["off"] == []
    plain = _train(loss, pin_memory, None, "auto", precision)
    assert ours.losses == pytest.approx(plain.losses, rel=2e-2)
