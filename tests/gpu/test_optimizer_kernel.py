"""The optimizer's kernel on a real device: what torch's own steps give, without waiting, in the memory that is promised."""

from __future__ import annotations

import copy
import gc
from typing import Any

import lightning as L
import pytest
import torch
from helpers import QUIET, causal_lm, loader
from torch import nn
from torch.optim import Adam, AdamW

from lightning_liger import LigerCallback
from lightning_liger.optim import kernel
from lightning_liger.optim.adamw import FusedStep, fused_step_of
from lightning_liger.optim.report import OptimizerReport
from lightning_liger.optim.taking import take_over
from lightning_liger.optim.trial import kernel_fails

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
SIZES = [1, 7, kernel.BLOCK, kernel.CHUNK - 1, kernel.CHUNK, 5 * kernel.CHUNK + 100, 3_000_000]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(size, generator=generator, device=CUDA).to(dtype) for size in SIZES]
    made.append(torch.randn(30_001, generator=generator, device=CUDA).to(dtype)[1:])  # not aligned
    made.append(torch.randn(20, 30, generator=generator, device=CUDA).to(dtype).t())
    return [nn.Parameter(t) for t in made]


def train(kind: Any, dtype: torch.dtype, take: Any, clip: float = 0.0, **options: Any) -> tuple[list[Any], Any]:
    of = parameters(dtype)
    optimizer = kind(
        [{"params": of[:4]}, {"params": of[4:], "lr": 1e-2, "weight_decay": 0.1}], **copy.deepcopy(options)
    )
    step = take(optimizer)
    generator = torch.Generator("cuda").manual_seed(1)
    for turn in range(5):
        for i, p in enumerate(of):
            gradient = torch.randn(p.shape, generator=generator, device=CUDA).to(dtype)
            if options.get("fused"):  # PyTorch's takes gradients that lie as their parameters do, and no others
                gradient = torch.empty_like(p).copy_(gradient)
            p.grad = None if (i + turn) % 5 == 0 else gradient
        if clip:
            if step is None:
                nn.utils.clip_grad_norm_(of, clip)
            else:
                step.clip(clip, leave_clipped=turn % 2 == 0)
        optimizer.step()
    return of, optimizer


def nothing(_: Any) -> None:
    return None


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"clip": 1.0}, {"lr": torch.tensor(1e-3)}])
@pytest.mark.parametrize("reference", ["fused", "foreach"])
def test_fp32_is_torchs(kind: Any, options: dict[str, Any], reference: str) -> None:
    if reference == "foreach" and "lr" in options:
        pytest.skip("torch refuses it")
    expected, plain = train(kind, torch.float32, nothing, **{reference: True}, **options)
    found, optimizer = train(kind, torch.float32, lambda o: FusedStep(o, None, kernel=True), **options)
    for a, b in zip(found, expected, strict=True):
        # PyTorch's fused kernel orders its fp32 operations in another way; foreach has the order of this package
        loose = 10.0 if reference == "fused" else 1.0
        torch.testing.assert_close(a, b, rtol=2e-6 * loose, atol=2e-6 * loose)
        for name in ("exp_avg", "exp_avg_sq"):
            found_state, plain_state = optimizer.state[a][name], plain.state[b][name]
            torch.testing.assert_close(found_state, plain_state, rtol=1e-5 * loose, atol=1e-7 * loose)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_state_is_the_operators(dtype: torch.dtype) -> None:
    expected, reference = train(AdamW, dtype, lambda o: FusedStep(o, torch.bfloat16, kernel=False), clip=1.0)
    found, optimizer = train(AdamW, dtype, lambda o: FusedStep(o, torch.bfloat16, kernel=True), clip=1.0)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
        for name in ("exp_avg", "exp_avg_sq"):
            x, y = optimizer.state[a][name].float(), reference.state[b][name].float()
            # the operators round clipped bf16 gradients to bf16, the kernel does not
            assert dtype == torch.bfloat16 or x.numel() < 200 or float((x != y).double().mean()) < 2e-2
            # one value of few, rounded the other way, is 2**-8 of it
            assert float((x - y).norm() / y.norm()) < (1e-3 if x.numel() >= 200 and dtype == torch.float32 else 1e-2)


def test_rounding_has_no_bias() -> None:
    """The second moment of a million entries falls as it should, where rounding to nearest would keep it."""
    p = nn.Parameter(torch.zeros(2**20, device=CUDA))
    FusedStep(optimizer := AdamW([p], lr=0.0), torch.bfloat16, kernel=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"].fill_(1.0)
    p.grad = torch.zeros_like(p)
    for _ in range(300):
        optimizer.step()
    found = optimizer.state[p]["exp_avg_sq"].double()
    # noise of 300 roundings over a million entries
    assert abs(float(found.mean()) / 0.999**300 - 1) < 2e-4
    assert len(found.unique()) > 10


def test_kernels_pass_their_trial() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert kernel_fails(CUDA, dtype, torch.bfloat16) == ""
    assert kernel_fails(CUDA, torch.float32, torch.float32) == ""


def test_nothing_waits_for_the_device() -> None:
    of = parameters(torch.float32)
    optimizer = AdamW(of, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    step = FusedStep(optimizer, torch.bfloat16, kernel=True)
    for turn in range(4):
        for p in of:
            p.grad = torch.ones_like(p)
        torch.cuda.set_sync_debug_mode("error" if turn > 1 else "default")
        try:
            step.clip(1.0, leave_clipped=False)
            optimizer.step()
            scheduler.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad is None for p in of)


def test_memory_of_a_step() -> None:
    """Four bytes of state an entry, and no temporaries."""
    gc.collect()
    torch.cuda.empty_cache()
    numel = 50_000_000
    p = nn.Parameter(torch.zeros(numel, device=CUDA))
    optimizer = AdamW([p])
    take_over([optimizer], "bf16", "auto", report := OptimizerReport(), sharded=False)
    p.grad = torch.zeros_like(p)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 4 * numel + 4 * 2**20
    assert report.by == "Triton" and report.bytes == 4 * numel


class Quiet(L.LightningModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model, self.options = causal_lm(), options
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.model(**batch).loss
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-3, eps=1e-4, **self.options)


@pytest.mark.parametrize("strategy", ["auto", "liger_fsdp"])
@pytest.mark.parametrize("options", [{}, {"optimizer_state_dtype": "bf16"}])
def test_through_a_trainer(options: dict[str, Any], strategy: str) -> None:
    def run(*callbacks: Any, strategy: Any = "auto") -> Quiet:
        module = Quiet()
        kept = {
            **QUIET,
            "accelerator": "gpu",
            "strategy": strategy,
            "gradient_clip_val": 0.3,
            "callbacks": [*callbacks],
        }
        trainer = L.Trainer(**kept, precision="bf16-mixed" if strategy != "auto" else "32-true")
        trainer.fit(module, loader())
        if callbacks:
            step = fused_step_of(trainer.optimizers[0])
            assert step is not None and step.kernel
            assert callbacks[0].report.optimizer.clipping
        return module

    plain = run()
    found = run(LigerCallback(verbose=False, verify="off", kernels=False, **options), strategy=strategy)
    assert found.losses == pytest.approx(plain.losses, rel=1e-4 if strategy == "auto" else 2e-2)


def test_a_choice_of_the_authors_is_kept() -> None:
    for option in ({"foreach": True}, {"fused": True}, {"fused": False}):
        optimizer = AdamW([nn.Parameter(torch.zeros(3, device=CUDA))], **option)
        take_over([optimizer], None, "auto", OptimizerReport(), sharded=False)
        assert fused_step_of(optimizer) is None
    half = AdamW([nn.Parameter(torch.zeros(3, device=CUDA, dtype=torch.bfloat16))])
    take_over([half], None, "auto", OptimizerReport(), sharded=False)
    assert fused_step_of(half) is None
