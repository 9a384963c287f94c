"""What else users count on: data, dtypes, collectives, evaluation before and after, and errors that say what to do."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning as L
import modules
import torch
import torch.distributed as dist
import torch.nn as nn
from helpers import causal_lm
from lightning.pytorch.callbacks import Callback
from runs import ACCELERATOR, DEVICE, QUIET, RANK, WORLD, case, distance, mean_over_ranks, say, train, whole
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerFSDPStrategy, grad_norm


def trainer_for(strategy: Any = "liger_fsdp", **options: Any) -> L.Trainer:
    return L.Trainer(accelerator=ACCELERATOR, devices=WORLD, strategy=strategy, **{**QUIET, **options})


def raised(kind: type[BaseException], run: Any) -> str:
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Collectives and their elements while the context is open."""
    counts: Counter[str] = Counter()
    # reduce_scatter_single is what newer releases call
    names = [n for n in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, n)]
    before = {name: getattr(dist, name) for name in names}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = kwargs["input"] if "input" in kwargs else args[1]
            counts["reduce"] += 1
            counts["bytes"] += tensor.numel() * tensor.element_size()
            return before[name](*args, **kwargs)

        return call

    for name in before:
        setattr(dist, name, counted(name))
    try:
        yield counts
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


@case
def every_rank_has_data_of_its_own() -> None:
    class Seen(modules.InInit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(int(row.sum()) for row in batch["input_ids"])
            return super().training_step(batch, batch_idx)

    seen: list[int] = []
    data: Any = modules.rows()
    trainer = trainer_for(use_distributed_sampler=True)
    assert not any(isinstance(c, LigerCallback) for c in trainer.callbacks)
    trainer.fit(Seen(), DataLoader(data, batch_size=2, collate_fn=modules.collate))
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, seen)
    assert sorted(x for own in everyone for x in own) == sorted(int(r.sum()) for r in data)
    # and without a callback of the user's, one joins: the report is there
    assert _report(SimpleNamespace(trainer=trainer))["padding_free"]["packed_calls"] > 0
    say("every_rank_has_data_of_its_own")


@case
def one_reduction_in_a_step() -> None:
    """Two steps of four micro-batches: each group is reduced twice, in fp32."""
    module = modules.InInit("llama")
    size = sum(p.numel() for p in module.parameters())
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2, "limit_val_batches": 0}
    with counting() as counts:
        train(module, WORLD, "liger_fsdp", [], **options)
    assert counts["reduce"] == 2 * 3, counts  # two blocks and the root
    assert 2 * 4 * size <= counts["bytes"] <= 1.1 * 2 * 4 * size, counts
    say(f"one_reduction_in_a_step: {counts['bytes'] // 2} bytes reduced for {size} parameters")


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
            report = _report(run)
            name = {fp32: "fp32", bf16: "bf16"}[stored]
            assert list(report["sharding"]["stored"]) == [name], report["sharding"]
            assert report["sharding"]["compute"] == ["bf16"] and report["sharding"]["reduce"] == ["fp32"]
            noticed = any("bf16=False" in note for note in report["notes"])
            assert noticed == (precision == "32-true"), report["notes"]
    say("masters_are_fp32_and_compute_is_bf16")


def _report(run: Any) -> dict[str, Any]:
    return next(c.report.to_dict() for c in run.trainer.callbacks if isinstance(c, LigerCallback))


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
        run = train(module, WORLD, LigerFSDPStrategy(bf16=False), [])
        expected = fused if fused is not None else (True if ACCELERATOR == "gpu" else None)
        assert run.trainer.optimizers[0].param_groups[0]["fused"] is expected
        parameters.append(run.parameters)
    assert distance(*parameters) < 1e-5
    say("adam_is_fused_where_it_may_be")


@case
def floating_inputs_meet_bf16_weights() -> None:
    """Features into a Linear outside of the blocks, from a module that was written for fp32."""
    run = train(modules.IsTheModel(), WORLD, LigerFSDPStrategy(), [])
    exact = train(modules.IsTheModel(), 1, "auto", [])
    for a, b in zip(mean_over_ranks(run.losses), exact.losses, strict=True):
        assert abs(a - b) < 0.02 * b
    say("floating_inputs_meet_bf16_weights")


@case
def own_sharding_decides_its_dtype() -> None:
    one = train(modules.OwnSharding(), 1, "auto", [])
    run = train(modules.OwnSharding(), WORLD, LigerFSDPStrategy(), [])
    assert distance(run.parameters, one.parameters) < 1e-5  # fp32, as fully_shard's default is
    report = _report(run)
    assert report["sharding"]["foreign"] == 2 and report["sharding"]["compute"] == ["fp32"]
    assert any("float32" in note for note in report["notes"])
    say("own_sharding_decides_its_dtype")


@case
def frozen_bf16_base_under_fp32_adapters() -> None:
    module = modules.Adapters(torch.bfloat16)
    before = whole({n: p for n, p in module.named_parameters() if not p.requires_grad})
    run = train(module, WORLD, "liger_fsdp", [])
    report = _report(run)["sharding"]
    assert list(report["stored"]) == ["fp32"] and list(report["frozen"]) == ["bf16"], report
    assert report["compute"] == ["bf16"] and report["reduce"] == ["fp32"]
    assert all(torch.equal(run.parameters[n], p) for n, p in before.items())
    say("frozen_bf16_base_under_fp32_adapters")


@case
def evaluating_before_and_after() -> None:
    """validate, fit, validate, test and predict with one Trainer; then another Trainer goes on."""

    class All(modules.OwnLoss):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.model(**batch).loss, sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch["input_ids"], batch["attention_mask"]).argmax(-1)

    def everything(ranks: int, strategy: Any) -> list[Any]:
        rank = RANK if ranks > 1 else 0
        devices: Any = ranks if ranks > 1 or ACCELERATOR == "cpu" else [DEVICE.index]
        module, found = All(), []
        for _ in range(2):
            trainer = L.Trainer(accelerator=ACCELERATOR, devices=devices, strategy=strategy(), **QUIET)
            loader = modules.loader(rank, ranks)
            found.append(trainer.validate(module, loader, verbose=False)[0]["val_loss"])
            trainer.fit(module, loader, loader)
            found.append(trainer.validate(module, loader, verbose=False)[0]["val_loss"])
            found.append(trainer.test(module, loader, verbose=False)[0]["test_loss"])
            predicted: Any = trainer.predict(module, loader)
            assert len(predicted) == 4
        return found

    def ours() -> Any:
        return LigerFSDPStrategy(bf16=False)

    one, two = everything(1, lambda: "auto"), everything(WORLD, ours)
    assert one[0] != one[1], one
    for a, b in zip(one, two, strict=True):
        assert abs(a - b) <= 1e-5 * a, (one, two)
    say("evaluating_before_and_after")


@case
def calls_from_hooks_and_callbacks() -> None:
    """The model is called and generates outside of any step, between the steps of a training that it does not disturb."""

    class Curious(modules.InInit):
        def on_fit_start(self) -> None:
            look(self)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            look(self)

        def on_validation_epoch_end(self) -> None:
            look(self)

    class Sampler(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            prompt = torch.tensor([[5, 6, 7]], device=pl_module.device)
            with torch.no_grad():
                made.append(pl_module.model.generate(prompt, max_new_tokens=4, do_sample=False).tolist())

    def look(module: Any) -> None:
        ids = torch.tensor([[5, 6, 7, 8]], device=module.device)
        values.append(float(module.model(ids).logits.sum()))
        values.append(float(module.model.model.embed_tokens(ids).sum()))

    both = []
    for ranks, strategy in ((1, "auto"), (WORLD, LigerFSDPStrategy(bf16=False))):
        values: list[float] = []
        made: list[Any] = []
        run = train(Curious(), ranks, strategy, [Sampler()])
        both.append((values, made, run.parameters))
    (values, made, parameters), (our_values, our_made, our_parameters) = both
    assert made == our_made and len(made) == 4
    torch.testing.assert_close(torch.tensor(our_values), torch.tensor(values), rtol=1e-4, atol=1e-4)
    assert distance(our_parameters, parameters) < 1e-5
    say("calls_from_hooks_and_callbacks")


@case
def unseeded_ranks_start_alike() -> None:
    class Random(modules.InInit):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(100 + RANK)
            for parameter in self.parameters():
                nn.init.normal_(parameter)
            self.table: Tensor
            self.register_buffer("table", torch.rand(3))

    module = Random()
    train(module, WORLD, LigerFSDPStrategy(bf16=False), [], max_steps=0, max_epochs=-1, limit_val_batches=0)
    torch.manual_seed(100)
    expected = torch.empty_like(whole(dict(module.named_parameters()))["model.model.embed_tokens.weight"])
    nn.init.normal_(expected)
    found = whole(dict(module.named_parameters()))["model.model.embed_tokens.weight"]
    assert torch.equal(found, expected)
    tables = [torch.empty(3, device=DEVICE) for _ in range(WORLD)]
    dist.all_gather(tables, module.table.to(DEVICE))
    assert torch.equal(tables[0], tables[1])
    say("unseeded_ranks_start_alike")


@case
def parameters_collected_too_early() -> None:
    class Early(modules.InInit):
        def __init__(self) -> None:
            super().__init__()
            self.collected = list(self.model.parameters())

        def configure_optimizers(self) -> Any:
            return modules.sgd(self.collected)

    one = train(Early(), 1, "auto", [])
    two = train(Early(), WORLD, LigerFSDPStrategy(bf16=False), [])
    assert distance(two.parameters, one.parameters) < 1e-5
    assert distance(one.parameters, whole(dict(Early().named_parameters()))) > 1e-3
    say("parameters_collected_too_early")


@case
def changes_that_come_too_late() -> None:
    class Resized(modules.InInit):
        def on_fit_start(self) -> None:
            self.model.resize_token_embeddings(128)

    class Replaced(modules.InInit):
        def on_fit_start(self) -> None:
            self.model.model.norm.weight = nn.Parameter(torch.ones(32, device=self.device))

    for kind in (Resized, Replaced):
        message = raised(RuntimeError, lambda k=kind: train(k(), WORLD, "liger_fsdp", []))  # type: ignore[misc]
        assert "configure_model" in message and "on_fit_start" in message, message
    say("changes_that_come_too_late")


@case
def norms_of_gradients() -> None:
    """A drop-in for Lightning's own helper, which asks for numbers that no rank holds."""
    from lightning.pytorch.utilities import grad_norm as lightnings

    class Norms(modules.OnTheModule):
        norms: Any = lightnings

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for norm_type in (2, "inf"):
                found.append({n: float(v) for n, v in type(self).norms(self, norm_type=norm_type).items()})

    class Ours(Norms):
        norms = grad_norm

    found: list[dict[str, float]] = []
    train(Norms(), 1, "auto", [])
    expected, found = found, []
    train(Ours(), WORLD, LigerFSDPStrategy(bf16=False), [])
    for a, b in zip(expected, found, strict=True):
        assert a.keys() == b.keys()
        assert all(abs(a[n] - b[n]) <= 2e-5 * max(a.values()) for n in a), (a, b)
    message = raised(RuntimeError, lambda: train(Norms(), WORLD, "liger_fsdp", []))
    assert "lightning_liger.grad_norm" in message, message
    say("norms_of_gradients")


@case
def training_again_after_an_exception() -> None:
    """In the middle of a forward, and in the middle of a backward; on every rank, as one that is caught would be."""

    class Broken(modules.InInit):
        where = ""

        def __init__(self) -> None:
            super().__init__("llama")
            self.model.model.layers[1].mlp.register_forward_hook(self.fail)

        def fail(self, layer: Any, args: Any, output: Tensor) -> None:
            if self.where == "forward":
                raise KeyError("in the middle of a forward")
            if self.where == "backward":
                output.register_hook(lambda gradient: 1 / 0)

    one = train(modules.InInit("llama"), 1, "auto", [])
    module = Broken()
    for where, kind in (("forward", KeyError), ("backward", ZeroDivisionError)):
        module.where = where
        raised(kind, lambda: train(module, WORLD, LigerFSDPStrategy(bf16=False), []))
    module.where = ""
    two = train(module, WORLD, LigerFSDPStrategy(bf16=False), [])
    assert distance(two.parameters, one.parameters) < 1e-5
    say("training_again_after_an_exception")


@case
def everything_is_given_back() -> None:
    module = modules.OnTheModule()
    plain = {n: type(m) for n, m in module.named_modules()}
    run = train(module, WORLD, LigerFSDPStrategy(bf16=False), [])
    run.trainer.strategy.restore_module()
    assert {n: type(m) for n, m in module.named_modules()} == plain
    assert not any(isinstance(p, DTensor) for p in module.parameters())
    assert distance({n: p.detach() for n, p in module.named_parameters()}, run.parameters) == 0
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    assert "training_step" not in module.__dict__
    again = train(module, WORLD, LigerFSDPStrategy(bf16=False), [])
    assert distance(again.parameters, run.parameters) > 1e-4
    say("everything_is_given_back")


@case
def hybrid_sharding_with_whole_copies() -> None:
    one = train(modules.OnTheModule(), 1, "auto", [], gradient_clip_val=0.5)
    run = train(
        modules.OnTheModule(),
        WORLD,
        LigerFSDPStrategy(replicate_size=WORLD, bf16=False),
        [],
        gradient_clip_val=0.5,
    )
    assert distance(run.parameters, one.parameters) < 1e-5
    report = _report(run)["sharding"]
    assert (report["copies"], report["ranks"]) == (WORLD, 1)
    gc.collect()
    say("hybrid_sharding_with_whole_copies")
