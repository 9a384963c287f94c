"""``optimizer_state_dtype`` through a Trainer, on modules that know nothing of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import pytorch_lightning as pl
import torch
from helpers import QUIET, Plain, causal_lm, fit, loader
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, Settings
from lightning_liger.optim.adamw import fused_step_of


class WithAdamW(Plain):
    def __init__(self, **options: Any) -> None:
        super().__init__(causal_lm("qwen2"))
        self.options = {"lr": 3e-3, **options}

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        made = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], **self.options)
        return {"optimizer": made, "lr_scheduler": torch.optim.lr_scheduler.LinearLR(made, 1.0, 0.5, 100)}


def ours(**options: Any) -> LigerCallback:
    return LigerCallback(verbose=False, verify="off", **{"optimizer_state_dtype": "bf16", **options})


def moments(run: Any) -> set[torch.dtype]:
    states = run.trainer.optimizers[0].state.values()
    return {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")}


def test_trains_as_well_as_fp32_state() -> None:
    """200 steps, 25 epochs: each epoch's loss is as near as that of another fp32 run, which learns a thousandth faster."""

    def epochs(callback: Any, **options: Any) -> torch.Tensor:
        run = fit(WithAdamW(**options), loader(count=32), callback, max_steps=200, max_epochs=25)
        assert len(run.losses) == 200 and (callback is None or moments(run) == {torch.bfloat16})
        return torch.tensor(run.losses).view(25, 8).mean(1)

    fp32 = epochs(None)
    apart = (epochs(ours()) / fp32 - 1).abs()
    noise = (epochs(None, lr=3.003e-3) / fp32 - 1).abs()
    print(f"bf16 state: within {apart.max():.4f}, mean {apart.mean():.4f}; noise {noise.max():.4f}, {noise.mean():.4f}")
    assert fp32[-1] < 0.6 * fp32[0]
    assert apart.mean() < 2 * noise.mean() + 0.002 and apart.max() < 2 * noise.max() + 0.01


@pytest.mark.parametrize(
    "clip", [{}, {"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}]
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_first_step_is_plains(clip: dict[str, Any], accumulate: int) -> None:
    """Until moments have been stored nothing is rounded: weights after one step are plain's."""
    options = {"max_steps": 1, "accumulate_grad_batches": accumulate, **clip}
    plain = fit(WithAdamW(eps=1e-3), loader(), None, **options)
    found = fit(WithAdamW(eps=1e-3), loader(), ours(), **options)
    for name, value in plain.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-5, atol=1e-6)
    for name, value in plain.gradients[0].items():
        torch.testing.assert_close(found.gradients[0][name], value, rtol=1e-4, atol=1e-6)


def test_hooks_without_a_name_count_as_the_users() -> None:
    class Module(WithAdamW):
        def configure_optimizers(self) -> Any:
            made = torch.optim.AdamW(self.parameters())
            made.register_step_post_hook(functools.partial(lambda *_: seen.append("after")))
            made.register_step_pre_hook(functools.partial(lambda *_: seen.append("before")))
            return made

    seen: list[Any] = []
    module = Module()
    fit(module, loader(), ours(), max_steps=1, gradient_clip_val=0.1)
    assert seen == ["before", "after"] and all(p.grad is not None for p in module.parameters())


def test_gradients_are_freed_unless_somebody_may_read_them() -> None:
    class Reader(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            norms.append(float(torch.stack([p.grad.norm() for p in module.parameters()]).norm()))

    class Quiet(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = causal_lm("qwen2")

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def run(module: Any, *callbacks: Any) -> Any:
        options = {**QUIET, "max_steps": 2, "gradient_clip_val": 0.1, "callbacks": [*callbacks, ours()]}
        trainer = L.Trainer(**options)
        trainer.fit(module, loader())
        return module

    norms: list[float] = []
    module = run(Quiet(), Reader())
    assert norms == pytest.approx([0.1, 0.1], rel=1e-3), "clipped, as plain leaves them"
    assert all(p.grad is not None for p in module.parameters())
    assert all(p.grad is None for p in run(Quiet()).parameters())

    class Overrides(Quiet):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, 0.1, "norm")
            norms.append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))

    norms.clear()
    run(Overrides())
    assert norms == pytest.approx([0.1, 0.1], rel=1e-3), "clipped before the step, for whoever looks there"


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_resumes_with_and_without(before: bool, after: bool, tmp_path: Path) -> None:
    def run(option: bool, **options: Any) -> Any:
        return fit(WithAdamW(), loader(), ours() if option else None, max_steps=6, max_epochs=2, **options)

    def keep(folder: str) -> Any:
        return ModelCheckpoint(dirpath=tmp_path / folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")

    through = run(before, callbacks=[keep("one")], enable_checkpointing=True)
    again = run(after, ckpt_path=str(tmp_path / "one" / "step=4.ckpt"))
    assert len(again.losses) == 2 and moments(again) == {torch.bfloat16 if after else torch.float32}
    saved = torch.load(tmp_path / "one" / "step=4.ckpt", weights_only=True)["optimizer_states"][0]["state"][0]
    assert saved["exp_avg"].dtype == (torch.bfloat16 if before else torch.float32) and float(saved["step"]) == 4.0
    for name, value in through.parameters.items():
        if before and after:
            assert torch.equal(again.parameters[name], value), name
        torch.testing.assert_close(again.parameters[name], value, rtol=0, atol=2e-3)


def test_both_trees_manual_optimization_and_frozen_parameters() -> None:
    class Manual(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = causal_lm("llama")
            self.model.model.embed_tokens.requires_grad_(False)

        def training_step(self, batch: Any, index: int) -> Any:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            loss = self.model(**batch).loss
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, 0.5, "norm")
                norms.append(float(torch.stack([p.grad.norm() for p in grads(optimizer)]).norm()))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            layers, head = self.model.model.parameters(), self.model.lm_head.parameters()
            return torch.optim.Adam(layers, lr=1e-2), torch.optim.AdamW(head, lr=1e-2)

    def grads(optimizer: Any) -> list[Any]:
        return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    norms: list[float] = []
    module = Manual()
    frozen = module.model.model.embed_tokens.weight.clone()
    callback = ours()
    trainer = pl.Trainer(**QUIET, callbacks=[callback])
    trainer.fit(module, loader())
    assert max(norms) < 0.5001 and torch.equal(module.model.model.embed_tokens.weight, frozen)
    assert [type(o) for o in trainer.optimizers] == [torch.optim.Adam, torch.optim.AdamW]
    first = trainer.optimizers[0]
    assert module.model.model.embed_tokens.weight not in first.state
    report = callback.report.to_dict()["optimizer"]
    assert report["found"] == report["applied"] == 2 and report["by"] == "PyTorch's operators"


def test_adapters_alone_have_state() -> None:
    peft = pytest.importorskip("peft")

    class Adapters(WithAdamW):
        def __init__(self) -> None:
            super().__init__()
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            self.model = peft.get_peft_model(causal_lm("qwen2"), config)

        def configure_optimizers(self) -> Any:
            a = [p for n, p in self.named_parameters() if "lora_A" in n]
            b = [p for n, p in self.named_parameters() if "lora_B" in n]
            return torch.optim.AdamW([{"params": a, "lr": 1e-3}, {"params": b, "lr": 1e-2}])

    module = Adapters()
    callback = ours()
    found = fit(module, loader(), callback)
    trained = [p for p in module.parameters() if p.requires_grad]
    assert moments(found) == {torch.bfloat16} and len(found.trainer.optimizers[0].state) == len(trained)
    assert callback.report.optimizer.bytes == 4 * sum(p.numel() for p in trained)


def test_other_optimizers_end_the_run_before_it_begins() -> None:
    module = Plain(causal_lm("qwen2"))  # SGD
    with pytest.raises(ValueError, match=r"optimizer_state_dtype='bf16' is about AdamW, but torch\.optim\.sgd\.SGD"):
        fit(module, loader(), ours())
    assert module.trainer.global_step == 0


def test_other_strategies_are_refused() -> None:
    class Own(L.pytorch.strategies.FSDPStrategy):
        pass

    from lightning_liger.optim.taking import take_over_plain

    class Trainer:
        strategy = object.__new__(Own)

    with pytest.raises(ValueError, match=r"does not fit Own.*liger_fsdp"):
        take_over_plain(Trainer, "bf16", "auto", None)
    take_over_plain(Trainer, None, "auto", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_state_dtype": "int8"}, r"optimizer_state_dtype='int8': expected 'bf16', or None"),
        ({"fused_optimizer": "yes"}, r"fused_optimizer='yes': expected one of 'auto'"),
        ({"optimizer_state_dtype": "bf16", "fused_optimizer": False}, "fused_optimizer=False forbids"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**options)


def test_nothing_is_taken_where_nothing_was_asked_for() -> None:
    run = fit(WithAdamW(), loader(), LigerCallback(verbose=False, verify="off"), max_steps=1)
    assert fused_step_of(run.trainer.optimizers[0]) is None and not run.report["optimizer"]["off"]
    run = fit(WithAdamW(), loader(), LigerCallback(verbose=False, verify="off", fused_optimizer=True), max_steps=1)
    assert fused_step_of(run.trainer.optimizers[0]) is None
    assert "on cpu" in run.report["optimizer"]["off"][0]


def test_a_module_without_a_language_model() -> None:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    data: Any = DataLoader(torch.randn(8, 4), batch_size=2)  # type: ignore[arg-type]
    run = fit(Net(), data, ours())
    assert moments(run) == {torch.bfloat16} and len(run.losses) == 4
