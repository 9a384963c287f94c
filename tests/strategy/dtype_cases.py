"""Which dtypes are stored, computed and reduced in, and that it costs no accuracy."""

from __future__ import annotations

from typing import Any

import modules
import own_modules
import torch
from helpers import causal_lm
from runs import (
    ACCELERATOR,
    DEVICE,
    WORLD,
    case,
    distance,
    mean_over_ranks,
    report_of,
    say,
    train,
    whole,
)

from lightning_liger import LigerCallback, LigerFSDPStrategy


@case
def masters_are_fp32_and_compute_is_bf16() -> None:
    class Watched(modules.InInit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            layer = self.model.model.layers[0]
            handle = layer.self_attn.q_proj.register_forward_hook(
                lambda m, a, out: dtypes.update(weight=m.weight.dtype, out=out.dtype)
            )
            found = super().training_step(batch, batch_idx)
            handle.remove()
            dtypes["head"] = self.model.lm_head.weight.dtype
            dtypes["rotary"] = self.model.model.rotary_emb.inv_freq.dtype
            dtypes["autocast"] = torch.is_autocast_enabled(DEVICE.type)
            return found

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    fp32, bf16 = torch.float32, torch.bfloat16
    for precision, stored in (("32-true", fp32), ("bf16-mixed", fp32), ("bf16-true", bf16)):
        for loaded in (fp32, bf16):
            dtypes: dict[str, Any] = {}
            module = Watched("llama")
            module.model.to(loaded)
            module.model.model.rotary_emb.float()
            run = train(module, WORLD, LigerFSDPStrategy(), [], precision=precision)
            assert dtypes == {"weight": bf16, "out": bf16, "head": bf16, "rotary": fp32, "autocast": False}, dtypes
            assert {p.dtype for p in module.parameters()} == {stored}
            state = run.trainer.optimizers[0].state
            assert {s["exp_avg"].dtype for s in state.values()} == {stored}
            report = report_of(run)
            name = {fp32: "fp32", bf16: "bf16"}[stored]
            assert list(report["sharding"]["stored"]) == [name], report["sharding"]
            assert report["sharding"]["compute"] == ["bf16"] and report["sharding"]["reduce"] == ["fp32"]
            noticed = any("bf16=False" in note for note in report["notes"])
            assert noticed == (precision == "32-true"), report["notes"]
    say("masters_are_fp32_and_compute_is_bf16")


@case
def bf16_errs_as_plain_bf16_does() -> None:
    """First gradients against those of fp32: no further away than those of one process in bf16."""
    errors: dict[str, float] = {"plain": 0.0, "ours": 0.0}
    once: dict[str, Any] = {"max_steps": 1, "limit_val_batches": 0}
    for seed in range(4):

        def make(seed: int = seed) -> Any:
            module = modules.InInit()
            module.model = causal_lm("llama", seed)
            return module

        exact, plain = (train(make(), 1, "auto", [], precision=p, **once) for p in ("32-true", "bf16-true"))
        ours = train(make(), WORLD, "liger_fsdp", [], **once)
        assert ours.losses != exact.losses
        for name, run in (("plain", plain), ("ours", ours)):
            gradients = {n: g.float() for n, g in whole(run.gradients[0]).items()}
            errors[name] += distance(gradients, whole(exact.gradients[0])) / 4
    assert 0 < errors["ours"] < errors["plain"], errors
    say(f"bf16_errs_as_plain_bf16_does: {errors}")


@case
def adam_is_fused_where_it_may_be() -> None:
    class Adam(modules.InInit):
        def configure_optimizers(self) -> Any:
            chosen = {} if self.fused is None else {"fused": self.fused}
            return torch.optim.AdamW(self.parameters(), 1e-3, eps=1e-3, **chosen)

    parameters = []
    for fused in (None, False):
        module = Adam()
        module.fused = fused
        callback = LigerCallback(verbose=False, fused_optimizer=False)
        run = train(module, WORLD, LigerFSDPStrategy(bf16=False), [callback])
        expected = fused if fused is not None else (True if ACCELERATOR == "gpu" else None)
        assert run.trainer.optimizers[0].param_groups[0]["fused"] is expected
        parameters.append(run.parameters)
    assert distance(*parameters) < 1e-5
    say("adam_is_fused_where_it_may_be")


@case
def floating_inputs_meet_bf16_weights() -> None:
    """Features into a Linear outside of the blocks, from a module that was written for fp32."""
    run = train(own_modules.IsTheModel(), WORLD, LigerFSDPStrategy(), [])
    exact = train(own_modules.IsTheModel(), 1, "auto", [])
    for a, b in zip(mean_over_ranks(run.losses), exact.losses, strict=True):
        assert abs(a - b) < 0.02 * b
    say("floating_inputs_meet_bf16_weights")


@case
def own_sharding_decides_its_dtype() -> None:
    one = train(modules.OwnSharding(), 1, "auto", [])
    run = train(modules.OwnSharding(), WORLD, LigerFSDPStrategy(), [])
    assert distance(run.parameters, one.parameters) < 1e-5  # fp32, as fully_shard's default is
    report = report_of(run)
    assert report["sharding"]["foreign"] == 2 and report["sharding"]["compute"] == ["fp32"]
    assert any("float32" in note for note in report["notes"])
    say("own_sharding_decides_its_dtype")


@case
def frozen_bf16_base_under_fp32_adapters() -> None:
    module = modules.Adapters(torch.bfloat16)
    before = whole({n: p for n, p in module.named_parameters() if not p.requires_grad})
    run = train(module, WORLD, "liger_fsdp", [])
    report = report_of(run)["sharding"]
    assert list(report["stored"]) == ["fp32"] and list(report["frozen"]) == ["bf16"], report
    assert report["compute"] == ["bf16"] and report["reduce"] == ["fp32"]
    assert all(torch.equal(run.parameters[n], p) for n, p in before.items())
    say("frozen_bf16_base_under_fp32_adapters")
