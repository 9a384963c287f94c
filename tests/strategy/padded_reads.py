"""Steps that read padded positions of a sharded model, which no rank can compute on its own."""

from __future__ import annotations

from typing import Any

import modules
import torch
import torch.nn.functional as F
from helpers import causal_lm
from runs import RANK, WORLD, case, distance, mean_over_ranks, report_of, say, train
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_liger import LigerCallback, LigerFSDPStrategy


def both(kind: type[Any], kept: bool = False, **options: Any) -> tuple[Any, Any, dict[str, Any], Any]:
    """With and without padding, on as many ranks; the second run's report and module."""
    runs, made = [], []
    for padding_free in (False, True):
        made.append(kind())
        strategy = LigerFSDPStrategy(bf16=False, reshard_after_forward=not kept)
        callback = LigerCallback(verbose=False, padding_free=padding_free)
        runs.append(train(made[-1], WORLD, strategy, [callback], **options))
    padded, free = runs
    assert distance(free.parameters, padded.parameters) < 1e-5
    for a, b in zip(mean_over_ranks(padded.losses), mean_over_ranks(free.losses), strict=True):
        assert abs(a - b) <= 1e-5 * abs(a), (padded.losses, free.losses)
    for name, value in padded.metrics.items():
        assert name.startswith("liger/") or abs(free.metrics[name] - value) <= 1e-5 * abs(value), name
    return padded, free, report_of(free)["padding_free"], made[1]


class Everywhere(modules.InInit):
    """Its loss counts every position, and its step is not to be made twice: it collects, counts and writes."""

    def __init__(self) -> None:
        super().__init__("llama")
        self.average, self.seen, self.steps = MeanMetric(), [], 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        ids = batch.pop("input_ids")
        ids.mul_(2).remainder_(97)  # written in place: a second time would be another batch
        loss = self.loss_of(self.model(ids, attention_mask=batch["attention_mask"]).logits)
        self.seen.append(float(loss.detach()))
        self.average(loss)
        self.log("average", self.average, on_epoch=True)
        self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def loss_of(self, logits: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(-1), logits.detach().flip(-1).softmax(-1), reduction="batchmean")


@case
def losses_over_padding_keep_it() -> None:
    _, free, report, module = both(Everywhere, limit_val_batches=0)
    assert report["packed_calls"] == 0
    assert any("reads padded positions of a sharded model" in reason for reason in report["off"]), report
    assert module.steps == len(module.seen) == len(free.losses)
    assert module.seen == free.losses
    say("losses_over_padding_keep_it")


@case
def ranks_without_padding_follow() -> None:
    class OneRank(Everywhere):
        """The other one's batches have no padding, and it runs the model twice."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if RANK == 0:
                shortest = int(batch["attention_mask"].sum(1).min())
                batch = {k: v[:, :shortest].contiguous() for k, v in batch.items()}
            twice = self.model(**{**batch, "input_ids": batch["input_ids"].clone()}).loss
            return super().training_step(batch, batch_idx) + twice

    for kept in (False, True):  # whole between forward and backward, a block still has a backward that others wait for
        _, _, report, _ = both(OneRank, kept, limit_val_batches=0)
        assert any("reads padded positions of a sharded model" in reason for reason in report["off"]), report
    say("ranks_without_padding_follow")


@case
def metrics_over_padding_keep_it() -> None:
    class Predictions(modules.InInit):
        def __init__(self) -> None:
            super().__init__("llama")
            self.predicted = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self.model(**batch)
            self.predicted(out.logits[:, :-1].argmax(-1).float())
            self.log("predicted", self.predicted, on_step=False, on_epoch=True)
            return out.loss

    padded, _, report, _ = both(Predictions, limit_val_batches=0)
    assert padded.metrics["predicted"] > 0
    assert any("reads padded positions of a sharded model" in reason for reason in report["off"]), report
    say("metrics_over_padding_keep_it")


@case
def references_of_a_step_lose_their_padding() -> None:
    class Preference(modules.InInit):
        def __init__(self) -> None:
            super().__init__("llama")
            self.reference = causal_lm("llama", seed=1).requires_grad_(False)

        def score(self, model: Any, batch: Any) -> Tensor:
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            picked = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
            return (picked * (labels != -100)).sum(-1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                reference = self.score(self.reference, batch)
            return -F.logsigmoid(0.1 * (self.score(self.model, batch) - reference)).mean()

    _, _, report, _ = both(Preference, limit_val_batches=0)
    assert report["packed_calls"] == report["calls"] == 8, report
    say("references_of_a_step_lose_their_padding")
