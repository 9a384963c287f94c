"""The first batch is gone through again, plain and accelerated: nothing else changes, and what is wrong is named."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from compiled_loss import CompiledLoss
from helpers import Plain, Run, Twice, assert_same, causal_lm, collate_shifted, fit, loader
from sabotage import Sabotage
from torch import Tensor

from lightning_liger import LigerCallback
from lightning_liger.padding import attention
from lightning_liger.proof.report import ProofError


def proof(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = run.report["proof"]["equivalence"]
    return found


def compared(run: Run) -> dict[str, Any]:
    """The numbers; fails where nothing was compared."""
    found = proof(run)
    assert found["agreement"] is not None and not found["skipped"], found
    assert not found["mismatch"], found
    agreement: dict[str, Any] = found["agreement"]
    return agreement


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "gpt2"])
def test_plain_and_accelerated_agree(kind: str) -> None:
    found = compared(fit(Plain(causal_lm(kind)), loader(), LigerCallback(verbose=False, verify="strict")))
    assert found["loss_difference"] < 1e-6 and found["gradient_difference"] < 2e-6
    assert 1e-8 < found["own_gradient"] < 1e-5
    assert found["loss"][0] == pytest.approx(4.6, abs=0.2) and found["gradient_norm"][0] > 1


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_the_tolerance_is_the_precisions_own_error(precision: str) -> None:
    run = fit(Plain(causal_lm("llama")), loader(), LigerCallback(verbose=False, verify="strict"), precision=precision)
    found = compared(run)
    assert 1e-4 < found["own_gradient"] < 0.2
    assert found["gradient_difference"] < 2.5 * found["own_gradient"]


class Everything(L.LightningModule):
    """Whatever a step may do besides computing a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = causal_lm("llama")
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.5)
        self.steps: list[int] = []
        self.seen = 0
        self.drawn: list[float] = []
        self.iterator = iter(range(100))
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("queue", torch.zeros(8, 32))
        self.model.model.layers[0].register_forward_hook(self.count)
        self.calls = 0

    def count(self, *_: Any) -> None:
        self.calls += 1

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.steps.append(next(self.iterator))
        self.seen += 1
        out = self.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True
        )
        logits = out.logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        pooled = self.norm(out.hidden_states[-1][:, 0])
        self.queue[:4] = pooled.detach()
        loss = loss + 0.01 * (self.drop(pooled) @ self.queue.T).logsumexp(-1).mean()
        self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        self.drawn += [random.random(), float(torch.rand(()))]
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", (logits.argmax(-1) == batch["labels"]).float().mean(), on_epoch=True, on_step=False)
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def _pair(make: Callable[[], Any], on: str = "strict", **options: Any) -> tuple[Any, Any, Run, Run]:
    """Accelerated with and without the proof; both must be the same training, bit for bit."""
    made, runs = [], []
    for verify in ("off", on):
        random.seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made.append(make())
            runs.append(fit(made[-1], loader(), LigerCallback(verbose=False, verify=verify), **options))
    return made[0], made[1], runs[0], runs[1]


def test_nothing_of_a_step_happens_twice() -> None:
    off, on, without, run = _pair(Everything)
    compared(run)
    assert run.losses == without.losses
    assert (on.steps, on.seen, on.drawn, on.calls) == (off.steps, off.seen, off.drawn, off.calls)
    for name, value in off.state_dict().items():
        assert torch.equal(value, on.state_dict()[name]), name
    assert {k: v for k, v in run.metrics.items() if not k.startswith("liger/")} == {
        k: v for k, v in without.metrics.items() if not k.startswith("liger/")
    }
    counters = [r.report["padding_free"] for r in (without, run)]
    assert counters[0] == counters[1]
    assert without.report["fused_head"] == run.report["fused_head"]


def test_dropout_draws_what_it_would_have_drawn() -> None:
    _, _, without, run = _pair(lambda: Plain(causal_lm("gpt2", resid_pdrop=0.3, embd_pdrop=0.2, attn_pdrop=0.1)))
    assert compared(run)["gradient_difference"] < 2e-6
    assert_same(without, run, loss=0.0, gradient=0.0, parameter=0.0)


def test_gradient_accumulation() -> None:
    _, _, without, run = _pair(lambda: Plain(causal_lm("llama")), accumulate_grad_batches=2)
    compared(run)
    assert_same(without, run, loss=0.0, gradient=0.0, parameter=0.0)


class ByHand(Plain):
    """Steps its optimizer itself, twice per batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.model(**batch).loss
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss.detach()}


def test_manual_optimization() -> None:
    off, on, _, run = _pair(lambda: ByHand(causal_lm("llama")))
    compared(run)
    for a, b in zip(off.parameters(), on.parameters(), strict=True):
        assert torch.equal(a, b)


class Preference(L.LightningModule):
    """Two models, four calls, one of them without gradients: DPO."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = causal_lm("llama"), causal_lm("llama", seed=1).requires_grad_(False)

    def logp(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:].clone()
        mask = labels != -100
        labels[~mask] = 0
        picked = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        return (picked * mask).sum(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            before = self.logp(self.reference, batch)
        gain = self.logp(self.policy, batch) - before
        return -F.logsigmoid(gain[:2] - gain[2:]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.parameters(), 0.1)


def test_a_preference_loss() -> None:
    assert compared(fit(Preference(), loader(), LigerCallback(verbose=False, verify="strict")))["gradient_norm"][0] > 0


class OwnShift(Plain):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        targets = batch.pop("targets")
        logits = self.model(**batch).logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.view(-1), ignore_index=-100)


def test_a_loss_of_the_steps_own() -> None:
    compared(fit(OwnShift(causal_lm("llama")), loader(collate_shifted), LigerCallback(verbose=False, verify="strict")))


# -- what is wrong is named --------------------------------------------------------------------------------------------


def _one_document(q: Tensor, k: Tensor, v: Tensor, layout: Any, features: Any) -> Tensor:
    """Attention that forgot where documents end."""
    scale = features.scale
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def test_a_dropped_mask_is_caught_and_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fit(Plain(causal_lm("llama")), loader())
    monkeypatch.setattr(attention, "by_torch", _one_document)
    with pytest.warns(UserWarning, match="padding removal computes something else than the plain code"):
        run = fit(Plain(causal_lm("llama")), loader(), LigerCallback(verbose=False))
    assert proof(run)["switched_off"] == ["padding removal"]
    assert run.losses[0] != pytest.approx(plain.losses[0], rel=1e-5)
    assert run.report["padding_free"]["packed_calls"] == 1, "only the first batch was packed"
    assert any("computes something else" in line for line in run.report["padding_free"]["off"])


def test_strict_ends_the_training_at_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "by_torch", _one_document)
    module = Plain(causal_lm("llama"))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    with pytest.raises(ProofError, match=r"padding removal computes something else .*gradients .* apart"):
        fit(module, loader(), LigerCallback(verbose=False, verify="strict"))
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters()), "no optimizer has stepped"


def test_a_wrong_fused_loss_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_liger.head import linear_cross_entropy

    right = linear_cross_entropy._chunk_loss

    def wrong(logits: Tensor, target: Tensor, smoothing: float, row_scale: Any) -> Any:
        loss, gradient = right(logits, target, smoothing, row_scale)
        return loss, None if gradient is None else gradient * 1.001

    monkeypatch.setattr(linear_cross_entropy, "_chunk_loss", wrong)
    with pytest.warns(UserWarning, match="the fused head computes something else"):
        run = fit(Plain(causal_lm("llama")), loader(), LigerCallback(verbose=False))
    assert proof(run)["switched_off"] == ["the fused head"]
    assert run.report["fused_head"]["fused_calls"] == 1


def test_rows_are_compared_where_the_batch_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_liger.proof import equivalence, fitting

    monkeypatch.setattr(equivalence, "missing_memory", lambda *_: "it would not fit")
    monkeypatch.setattr(fitting, "_ROWS_TOKENS", 30)
    run = fit(Plain(causal_lm("llama")), loader(), LigerCallback(verbose=False, verify="strict"))
    assert compared(run)["gradient_difference"] < 2e-6
    assert proof(run)["part"] == "2 of 4 rows, hidden states only"
    monkeypatch.setattr(attention, "by_torch", _one_document)
    with pytest.raises(ProofError, match="padding removal"):
        fit(Plain(causal_lm("llama")), loader(), LigerCallback(verbose=False, verify="strict"))


# -- what cannot be compared is said -----------------------------------------------------------------------------------


class _Scaled(torch.autograd.Function):
    """By two; with a gradient that is wrong on purpose, as in gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.by * grad, None


scaled = _Scaled.apply  # as many keep it, so that a replaced `apply` would not be seen


class OwnFunction(Plain):
    """Autograd functions on logits and on the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        logits = scaled(logits, 0.5)
        return Twice.apply(F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()))


def test_autograd_functions_of_the_users_own() -> None:
    assert "apply" not in vars(torch.autograd.Function.__mro__[1])
    _, _, without, run = _pair(lambda: OwnFunction(causal_lm("llama")), "warn")  # logits are read in full
    found = compared(run)
    assert found["loss"][0] == pytest.approx(run.losses[0], rel=1e-5) and found["gradient_difference"] < 2e-6
    assert proof(run)["without_loss"] == ""
    assert run.losses == without.losses
    assert "apply" not in vars(torch.autograd.Function.__mro__[1])


class OwnBackward(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizers().step()
        return {"loss": loss.detach()}


@pytest.mark.parametrize(
    ("kind", "reason"), [(OwnBackward, "did not differentiate the loss"), (CompiledLoss, "compiled code")]
)
def test_hidden_states_are_compared_where_the_loss_cannot_be(
    kind: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, without, run = _pair(lambda: kind(causal_lm("llama")))
    assert compared(run)["gradient_difference"] < 2e-6
    assert reason in proof(run)["without_loss"] and proof(run)["part"] == "hidden states only"
    assert run.losses == without.losses
    monkeypatch.setattr(attention, "by_torch", _one_document)
    with pytest.raises(ProofError, match="padding removal"):
        fit(kind(causal_lm("llama")), loader(), LigerCallback(verbose=False, verify="strict"))


class Compilations(L.Callback):
    """Graphs that were made until the first backward, and until the comparison after it."""

    def __init__(self) -> None:
        self.made = 0
        self.at_backward = self.at_end = -1

    def backend(self, graph: Any, inputs: Any) -> Any:
        self.made += 1
        return graph.forward

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.at_backward = self.made if self.at_backward < 0 else self.at_backward

    def on_train_batch_end(self, *_: Any) -> None:
        self.at_end = self.made if self.at_end < 0 else self.at_end


def test_layers_that_the_user_compiled() -> None:
    torch._dynamo.reset()
    seen, model = Compilations(), causal_lm("llama")
    for layer in model.model.layers:
        layer.compile(backend=seen.backend, dynamic=True)
    run = fit(Plain(model), loader(), LigerCallback(verbose=False, verify="strict"), callbacks=[seen])
    assert compared(run)["gradient_difference"] < 2e-6 and proof(run)["part"] == ""
    assert run.report["padding_free"]["packed_calls"] == 4
    assert seen.at_end == seen.at_backward > 0, "nothing is compiled for the proof"


class Hooked(Plain):
    def on_train_start(self) -> None:
        next(self.model.parameters()).register_hook(lambda grad: grad)


def test_what_cannot_be_compared_is_said() -> None:
    run = fit(Hooked(causal_lm("llama")), loader(), LigerCallback(verbose=False, verify="warn"))
    assert "hooks on parameters" in proof(run)["skipped"] and proof(run)["agreement"] is None


def test_randomness_is_not_taken_for_a_mistake() -> None:
    class Noisy(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + 0.1 * torch.randn_like(x))

    model = causal_lm("llama")
    model.model.layers[0].mlp = Noisy(model.model.layers[0].mlp)
    run = fit(Plain(model), loader(), LigerCallback(verbose=False, verify="strict"))
    assert "draws random numbers" in proof(run)["skipped"]
    assert proof(run)["switched_off"] == []


def test_a_sabotaged_weight_read_by_both_is_no_mismatch() -> None:
    """Whatever happens to the module itself happens to both runs."""

    def act(module: Any) -> None:
        with torch.no_grad():
            module.model.model.norm.weight.mul_(3)

    compared(fit(Plain(causal_lm("llama")), loader(), LigerCallback(verbose=False), callbacks=[Sabotage(act)]))


def test_copies_made_in_the_step_that_is_written_down() -> None:
    class Copies(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                self.twin = [copy.deepcopy(self.model)]
            return super().training_step(batch, batch_idx)

    off, on, _, run = _pair(lambda: Copies(causal_lm("llama")))
    compared(run)
    assert not any("training_step" in vars(m) or "forward" in vars(m) for m in on.modules())
    batch = next(iter(loader()))
    assert on.twin[0](**batch).loss == off.twin[0](**batch).loss
