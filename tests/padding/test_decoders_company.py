"""Decoders in plain PyTorch together with precision, accumulation, validation, copies, hooks, compilers and litgpt."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from typing import Any

import decoder_models as models
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import VOCAB, assert_same, both, causal_lm, collate_shifted, fit, loader, relative_all
from test_decoders import Trains, assert_left, assert_packed, loss_inside, loss_outside, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lightning_liger import LigerCallback, Settings, accelerate


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (3, 14), generator=generator)
    labels = ids.roll(-1, 1)
    for row, length in enumerate((14, 5, 9)):
        ids[row, length:], labels[row, length - 1 :] = 0, -100
    return ids, labels


def test_accumulation_and_validation() -> None:
    plain, ours = both(
        lambda: Trains(lambda: models.Llama("inside"), loss_outside),
        lambda: loader(collate_shifted),
        val=lambda: loader(collate_shifted, seed=3),
        accumulate_grad_batches=2,
        max_steps=-1,
        max_epochs=2,
    )
    assert_same(plain, ours)
    assert_packed(ours, calls=16)
    assert ours.metrics["val_loss"] == pytest.approx(plain.metrics["val_loss"], rel=1e-5)


@pytest.mark.parametrize("kind", ["passed", "inside"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_is_no_worse(precision: str, kind: str) -> None:
    theirs, mine = [0.0, 0.0], [0.0, 0.0]
    for seed in range(6):
        runs = []
        for chosen, callback in (("32-true", None), (precision, None), (precision, LigerCallback(verbose=False))):
            module = Trains(lambda: models.Llama(kind), loss_outside)
            data = loader(collate_shifted, seed=seed, count=8, batch_size=8)
            runs.append(fit(module, data, callback, max_steps=1, precision=chosen))
        exact, plain, ours = runs
        assert_packed(ours, calls=1)
        for errors, found in ((theirs, plain), (mine, ours)):
            errors[0] += abs(found.losses[0] - exact.losses[0])
            errors[1] += relative_all({n: g.float() for n, g in found.gradients[0].items()}, exact.gradients[0])
    assert mine[0] <= 1.3 * theirs[0] and 0 < mine[1] <= 1.05 * theirs[1], (mine, theirs)


def test_dropout_only_draws_other_numbers() -> None:
    class Dropping(models.NanoGPT):
        def __init__(self) -> None:
            super().__init__(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.1, True))
            for module in self.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.1

    plain, ours = both(lambda: Trains(Dropping, loss_inside), lambda: loader(collate_shifted))
    assert_packed(ours)
    assert ours.losses[0] != plain.losses[0] and ours.losses[0] == pytest.approx(plain.losses[0], rel=0.1)


def test_nothing_is_disturbed_by_the_comparison() -> None:
    model = models.NanoGPT()
    model.register_buffer("count", torch.zeros(()))
    hidden = model.hidden

    model.calls, model.lengths, model.total = 0, [], torch.zeros(2)  # type: ignore[assignment]

    def counting(idx: Tensor) -> Tensor:
        model.count += 1
        model.calls += 1  # type: ignore[operator]
        model.lengths.append(idx.shape[1])  # type: ignore[operator, union-attr]
        model.total += 1  # as torchmetrics keeps its sums
        model.cache = idx
        return hidden(idx)

    model.hidden = counting  # type: ignore[method-assign]
    handle = accelerate(model)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    ids, labels = batch()
    model(ids, labels)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert float(model.count) == 1 and model.training
    assert model.calls == 1 and model.lengths == [14] and model.total.tolist() == [1, 1] and model.cache is ids
    assert all(p.grad is None for p in model.parameters())
    report = handle.report.to_dict()
    assert report["padding_free"]["packed_calls"] == report["padding_free"]["calls"] == 1
    assert report["fused_head"]["fused_calls"] == 1


def test_parts_that_see_one_token_at_a_time_run_on_rows() -> None:
    class Gated(nn.Module):
        """An MLP that knows where its tokens stand."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gate = models.mlp(), nn.Parameter(torch.randn(models.LONGEST, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.gate[: x.shape[1]]

    torch.manual_seed(0)
    model = models.Llama("passed")
    model.layers[1].mlp = Gated()
    ids, labels = batch()
    plain = copy.deepcopy(model)
    handle = accelerate(model)
    for each in (model, plain):
        F.cross_entropy(each(ids).flatten(0, 1), labels.flatten()).backward()
    assert handle.report.padding.packed_calls == 1
    first, second = (layer for layer in model.layers)
    by_row = [vars(m)["forward"].by_row for m in (first.norm_1, first.mlp, second.norm_2, second.mlp)]
    assert by_row == [True, True, True, False]
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, plain)]
    assert relative_all(*gradients) < 1e-5


def test_copies_pickles_and_what_is_left_after() -> None:
    torch.manual_seed(0)
    model = models.Llama("passed")
    ids, labels = batch()
    expected = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    handle = accelerate(model)
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    for each in (model, copied, loaded):
        loss = F.cross_entropy(each(ids).flatten(0, 1), labels.flatten())
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert handle.report.padding.packed_calls >= 1
    handle.revert()
    assert {n: dict(vars(m)) for n, m in model.named_modules()} == before
    assert type(copied(ids)) is Tensor and type(loaded(ids)) is Tensor


def test_forward_hooks_keep_the_padding() -> None:
    seen: list[Tensor] = []

    def make() -> nn.Module:
        model = models.NanoGPT()
        model.transformer["ln_f"].register_forward_hook(lambda m, args, out: seen.append(out.detach().mean()))
        return model

    assert_left(run(make), "forward hooks")
    assert len(seen) == 8 and all(type(s) is Tensor for s in seen)
    assert torch.allclose(torch.stack(seen[:4]), torch.stack(seen[4:]), atol=1e-5)


def test_a_function_of_its_own_under_reentrant_checkpointing() -> None:
    class Own(models.NanoGPT):
        def __init__(self) -> None:
            super().__init__(lambda q, k, v: models.causal(models.Twice.apply(q), k, v), reentrant=True)

    assert_left(run(Own), "an autograd function of its own")


CHECKPOINTED = {
    "parts, reentrant": "parts of a block",
    "the embedding": "its embedding of tokens is inside of gradient checkpointing",
    "the embedding, reentrant": "its embedding of tokens is inside of gradient checkpointing",
    "parts": "",
    "sequence": "",
    "sequence, reentrant": "",
}


@pytest.mark.parametrize("where", CHECKPOINTED)
def test_checkpointing_of_other_things_than_blocks(where: str) -> None:
    reentrant = where.endswith("reentrant")

    class Parts(models.Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + checkpoint(self.attn, self.ln_1(x), use_reentrant=reentrant)
            return x + checkpoint(self.mlp, self.ln_2(x), use_reentrant=reentrant)

    class Model(models.NanoGPT):
        def __init__(self) -> None:
            super().__init__()
            if where.startswith("parts"):
                self.transformer["h"] = nn.ModuleList(Parts() for _ in range(2))

        def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
            if where.startswith("the"):
                x = checkpoint(self.hidden, idx, use_reentrant=reentrant)
            elif where.startswith("sequence"):
                blocks = list(self.transformer["h"])
                x = checkpoint_sequential(blocks, 2, self.transformer["wte"](idx), use_reentrant=reentrant)
            else:
                x = self.hidden(idx)
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # type: ignore[union-attr]

    ours = run(Model)
    if CHECKPOINTED[where]:
        assert_left(ours, CHECKPOINTED[where])
    else:
        assert_packed(ours)


def test_compiled_layers_keep_the_padding() -> None:
    def make() -> nn.Module:
        model = models.NanoGPT()
        for block in model.transformer["h"]:
            block.compile(backend="eager")
        return model

    assert_left(run(make), "compiled")


def test_a_compiled_function_inside() -> None:
    turned = torch.compile(models.turned, backend="eager")

    class Compiled(models.NanoGPT):
        def __init__(self) -> None:
            angles = models.angles(models.WIDTH // models.HEADS)
            angles = torch.cat((angles, angles), -1)

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                a = angles[: q.shape[2]]
                return models.causal(turned(q, a.cos(), a.sin()), turned(k, a.cos(), a.sin()), v)

            super().__init__(attend)

    assert run(Compiled).report["padding_free"]["applied"] == 1


def test_generating_does_not_pack() -> None:
    class Generates(models.NanoGPT):
        @torch.no_grad()
        def generate(self, idx: Tensor, count: int) -> Tensor:
            for _ in range(count):
                idx = torch.cat((idx, self(idx)[0][:, -1].argmax(-1, keepdim=True)), 1)
            return idx

    torch.manual_seed(0)
    model = Generates()
    ids, _ = batch()
    expected = model.generate(ids, 3)
    handle = accelerate(model)
    assert torch.equal(model.generate(ids, 3), expected)
    assert handle.report.padding.calls == 0


def test_reading_the_last_column_outside_of_the_decoder() -> None:
    """Padded positions of what a packed call returned are those of a padded run, logits and hidden states alike."""
    torch.manual_seed(0)
    model = models.Llama("inside")
    ids, _ = batch()
    expected = model(ids)
    accelerate(model, Settings())
    found = model(ids)
    torch.testing.assert_close(found[:, -1] * 1.0, expected[:, -1], rtol=1e-5, atol=1e-5)
    (expected.square().mean() - found.square().mean()).backward()
    assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) < 1e-5


@pytest.mark.parametrize("kind", ["transformers", "decoder"])
def test_detached_logits_stay_detached_when_padding_is_read(kind: str) -> None:
    def logits(model: Any, ids: Tensor) -> Tensor:
        return model(ids) if kind == "decoder" else model(ids, attention_mask=(ids != 0).long()).logits

    def alone(a: Tensor, real: Tensor) -> Tensor:
        return (a.detach().roll(1, -1).log_softmax(-1).sum(-1) * real).mean() + 0.1 * a.square().mean()

    def turned(a: Tensor, real: Tensor) -> Tensor:
        return ((a.softmax(-1) * (a.log_softmax(-1) - a.detach().roll(1, -1).log_softmax(-1))).sum(-1) * real).mean()

    for loss in (alone, turned):
        torch.manual_seed(0)
        model = models.Llama("inside") if kind == "decoder" else causal_lm("llama")
        plain = copy.deepcopy(model)
        handle = accelerate(model)
        ids, labels = batch()
        for each in (plain, model):
            loss(logits(each, ids), labels >= 0).backward()
        assert handle.report.padding.packed_calls == handle.report.padding.padded_runs == 1, loss
        gradients = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, plain)]
        assert relative_all(*gradients) < 1e-5, loss


def test_multi_head_attention() -> None:
    class Encoder(nn.Module):
        def __init__(self, first: bool, padding: bool, hint: bool | None) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=not first, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head, self.first, self.padding, self.hint = nn.Linear(32, VOCAB), first, padding, hint

        def forward(self, ids: Tensor) -> Tensor:
            h = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
            h = h.transpose(0, 1) if self.first else h
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            mask = mask if self.hint else mask.isinf()
            padding = (ids == 0) if self.padding else None
            h = self.encoder(h, mask=mask, src_key_padding_mask=padding, is_causal=self.hint)
            return self.head(h.transpose(0, 1) if self.first else h)

    for first, padding, hint in ((False, False, True), (True, False, None), (False, True, None)):
        assert_packed(run(lambda a=first, b=padding, c=hint: Encoder(a, b, c), loss_outside))  # type: ignore[misc]


LITGPT = ("pythia-14m", "tiny-llama-1.1b", "Gemma-2b", "Qwen3-0.6B", "phi-2", "OLMo-2-1124-7B", "gemma-2-2b")


@pytest.mark.skipif(importlib.util.find_spec("litgpt") is None, reason="litgpt is not installed")
@pytest.mark.parametrize("name", LITGPT)
def test_litgpt(name: str) -> None:
    from litgpt.config import Config
    from litgpt.model import GPT

    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 4, "padded_vocab_size": VOCAB, "head_size": 8}
    groups = Config.from_name(name).n_query_groups
    heads = Config.from_name(name).n_head
    sizes |= {"intermediate_size": 48, "block_size": 32, "n_query_groups": {1: 1, heads: 4}.get(groups, 2)}
    ours = run(lambda: GPT(Config.from_name(name, **sizes)), loss_outside)
    if name == "gemma-2-2b":
        assert_left(ours, "matrix product")  # its scores are capped by hand
    else:
        assert_packed(ours)
