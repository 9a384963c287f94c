"""Modules that know nothing of groups, of many kinds, in groups of two and in one of four."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import modules
import pytorch_lightning as pl
import torch
import transformers
from helpers import causal_lm
from runs import WORLD, distance
from sequence_runs import CASES, EXACT, SIZES, fit, mean_over_ranks, rows, say
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP


def _same(name: str, make: Callable[[], Any], sizes: tuple[int, ...] = (), **options: Any) -> None:
    sizes = sizes or (SIZES[len(CASES) % len(SIZES)],)  # one or the other; all of both take twice the time

    def check() -> None:
        reference = fit(make(), rows(0), val=rows(0), **options)
        for k in sizes:
            run = fit(make(), data := rows(WORLD // k), k, val=data, **options)
            losses = mean_over_ranks(run.losses)
            loss = max(abs(a - b) / abs(b) for a, b in zip(losses, reference.losses, strict=True))
            weight = distance(run.parameters, reference.parameters)
            found = f"loss {loss:.1e} weights {weight:.1e} over {len(losses)} steps"
            assert loss <= EXACT and weight <= EXACT, (name, k, found)
            for metric, value in reference.metrics.items():
                assert abs(run.metrics[metric] - value) <= 1e-5 * max(abs(value), 1), (metric, run.metrics, value)
            report = run.report
            assert report["padding_free"]["packed_calls"] > 0 and report["sequence_parallel"]["ranks"] == k, report
            say(f"{name} in groups of {k}: {found}")

    CASES[f"kind_{name}"] = check


class Rewards(L.LightningModule):
    """A value head on hidden states at every token, and a score at the last one, as reward models and critics have."""

    def __init__(self) -> None:
        super().__init__()
        self.model = causal_lm("llama").model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.value, self.score = nn.Linear(32, 1), nn.Linear(32, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mask = batch["attention_mask"]
        hidden = self.model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
        values = self.value(hidden).squeeze(-1)
        last = hidden[torch.arange(len(mask)), mask.sum(1) - 1]
        each = ((values - 0.5).square() * mask).sum(1) / mask.sum(1)
        return each.mean() + (self.score(last) - batch["input_ids"].sum(1, keepdim=True) / 1000).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.005)


class Classifies(L.LightningModule):
    """transformers' own classification head."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.Qwen2Config(**{**causal_lm("qwen2").config.to_dict(), "num_labels": 3})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.model = transformers.Qwen2ForSequenceClassification(config).train()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = batch["input_ids"][:, 0] % 3
        found = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels)
        return found.loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class Distils(modules.InInit):
    """A teacher's distribution, entropy and the loss, from the same logits."""

    def __init__(self) -> None:
        super().__init__("llama")
        self.teacher = causal_lm("llama", seed=9).eval().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits.softmax(-1)
        found = self.model(**inputs, labels=batch["labels"])
        counted = (batch["labels"] != -100).float()
        each = nn.functional.kl_div(found.logits.log_softmax(-1), wanted, reduction="none").sum(-1)
        return found.loss + (each * counted).sum() / counted.sum()


class Sizes(modules.InInit):
    """Writes down how many tokens its layers really see."""

    def __init__(self, kind: str = "qwen2") -> None:
        super().__init__(kind)
        self.sizes: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        kinds = (Qwen2MLP, Gemma2MLP)
        seen: list[int] = []
        originals = {kind: kind.forward for kind in kinds}
        for kind, original in originals.items():

            def watched(module: Any, x: Tensor, original: Any = original) -> Any:
                seen.append(x.shape[-2])
                return original(module, x)

            kind.forward = watched
        try:
            return super().training_step(batch, batch_idx)
        finally:
            for kind, original in originals.items():
                kind.forward = original
            self.sizes.append((int(batch["attention_mask"].sum()), max(seen)))


def _layers_see_a_slice() -> None:
    for k in SIZES:
        fit(module := Sizes(), rows(WORLD // k), k)
        assert all(seen == -(-tokens // k) for tokens, seen in module.sizes), module.sizes
        say(f"layers see a slice in groups of {k}: {module.sizes}")


CASES["layers_see_a_slice"] = _layers_see_a_slice
_same("gemma2", lambda: modules.InInit("gemma2"), sizes=SIZES)
_same("gpt2", modules.InSetup)
_same("configure_model", modules.InConfigureModel, accumulate_grad_batches=2)
_same("own_loss", modules.OwnLoss, sizes=SIZES)
_same("metrics", modules.Metrics)
_same("adapters", modules.Adapters)
_same("manual", modules.Manual)
_same("policy_and_reference", modules.PolicyAndReference, sizes=SIZES)
_same("on_the_module", modules.OnTheModule, gradient_clip_val=0.5)
_same("two_optimizers", modules.TwoOptimizers)
_same("manual_on_the_module", modules.ManualOnTheModule)
_same("thawed", modules.Thawed)
_same("experts", modules.Experts)
_same("own_sharding", modules.OwnSharding)
_same("rewards", Rewards)
_same("classifies", Classifies)
_same("distils", Distils)
_same("checkpointed", modules.InInit, strategy={"activation_checkpointing": "full"})
_same("selectively", modules.InInit, strategy={"activation_checkpointing": "selective"})
_same("offloaded", modules.InInit, strategy={"offload": True})
_same("by_value", modules.InInit, gradient_clip_val=0.002, gradient_clip_algorithm="value")
_same("pytorch_lightning", modules.InInitPL, tree=pl)
