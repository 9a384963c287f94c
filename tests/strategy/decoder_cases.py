"""Decoders in plain PyTorch: their padding is removed in pieces, too, and every rank takes part in finding out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from helpers import VOCAB
from runs import RANK, WORLD, case, distance, mean_over_ranks, report_of, say, train
from torch import Tensor

from lightning_liger import LigerCallback, LigerFSDPStrategy

sys.path.append(str(Path(__file__).parent.parent / "padding"))
import decoder_models


class Decodes(L.LightningModule):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        found = self.model(self.ids(batch, batch_idx))
        logits = found[0] if isinstance(found, tuple) else found
        return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))

    def ids(self, batch: Any, batch_idx: int) -> Tensor:
        ids: Tensor = batch["input_ids"]
        return ids

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class LossInside(Decodes):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        return self.model(self.ids(batch, batch_idx), targets)[1]


def compare(make: Callable[[], Any], packed: bool = True, **strategy: Any) -> dict[str, Any]:
    one = train(make(), 1, "auto", [])
    two = train(make(), WORLD, LigerFSDPStrategy(bf16=False, **strategy), [])
    losses = mean_over_ranks(two.losses)
    worst = max(abs(a - b) / abs(a) for a, b in zip(one.losses, losses, strict=True))
    parameter = distance(two.parameters, one.parameters)
    assert worst <= 1e-5 and parameter <= 1e-5, (worst, parameter)
    assert abs(two.metrics["val_loss"] - one.metrics["val_loss"]) <= 1e-5 * one.metrics["val_loss"]
    report = report_of(two)["padding_free"]
    assert (report["packed_calls"] > 0) == packed, report
    return dict(report)


@case
def decoders_lose_their_padding() -> None:
    nano, reentrant = (lambda: decoder_models.NanoGPT(), lambda: decoder_models.NanoGPT(reentrant=True))
    kept = lambda: decoder_models.NanoGPT(reentrant=False)  # noqa: E731
    llama = lambda: decoder_models.Llama()  # noqa: E731
    for name, make, options in (
        ("loss inside", lambda: LossInside(nano), {}),
        ("checkpointed by itself", lambda: LossInside(kept), {}),
        ("reentrantly", lambda: LossInside(reentrant), {}),
        ("rotary", lambda: Decodes(llama), {"reshard_after_forward": False}),
        ("full", lambda: Decodes(llama), {"activation_checkpointing": "full"}),
        ("selective", lambda: LossInside(nano), {"activation_checkpointing": "selective", "prefetch": 1}),
    ):
        report = compare(make, **options)
        assert report["packed_calls"] == 8 - 2 * RANK, (name, report)  # one batch of rank 1 has no padding
    say("decoders_lose_their_padding")


@case
def decoders_of_which_one_rank_has_padding() -> None:
    class Later(LossInside):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            ids, labels = batch["input_ids"], batch["labels"]
            if batch_idx == 0 or RANK + batch_idx == 1:  # nobody has any in the first, rank 1 alone in the second
                width = int(batch["attention_mask"].sum(1).min())
                ids, labels = ids[:, :width], labels[:, :width]
            return self.model(ids, F.pad(labels[:, 1:], (0, 1), value=-100))[1]

    run = train(Later(decoder_models.NanoGPT), WORLD, LigerFSDPStrategy(bf16=False), [])
    report = report_of(run)["padding_free"]
    assert report["packed_calls"] == 4, report
    again = train(Later(decoder_models.NanoGPT), WORLD, LigerFSDPStrategy(bf16=False), [without_it()])
    assert distance(run.parameters, again.parameters) <= 1e-5
    say("decoders_of_which_one_rank_has_padding")


def without_it() -> Any:
    return LigerCallback(padding_free=False, verbose=False)


@case
def decoders_beside_a_reference() -> None:
    class Preference(Decodes):
        def __init__(self) -> None:
            super().__init__(decoder_models.Llama)
            torch.manual_seed(1)
            self.reference = decoder_models.Llama().requires_grad_(False)

        def score(self, model: Any, batch: Any) -> Tensor:
            logits = model(batch["input_ids"])[:, :-1]
            return -F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none").sum(-1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                reference = self.score(self.reference, batch)
            return -F.logsigmoid(0.1 * (self.score(self.model, batch) - reference)).mean()

    report = compare(Preference)
    assert report["packed_calls"] == 2 * (8 - 2 * RANK), report
    say("decoders_beside_a_reference")


@case
def decoders_whose_loss_counts_padding() -> None:
    class Everywhere(Decodes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.model(batch["input_ids"])
            return F.kl_div(logits.log_softmax(-1), logits.detach().flip(-1).softmax(-1), reduction="mean")

    runs = [
        train(Everywhere(decoder_models.Llama), WORLD, LigerFSDPStrategy(bf16=False), callbacks, limit_val_batches=0)
        for callbacks in ([without_it()], [])
    ]
    assert distance(runs[1].parameters, runs[0].parameters) <= 1e-5
    report = report_of(runs[1])["padding_free"]
    assert any("reads padded positions" in text for text in report["off"]), report
    say("decoders_whose_loss_counts_padding")


@case
def decoders_that_keep_their_padding() -> None:
    for kind, reason in ((decoder_models.Convolution, "conv"), (decoder_models.Statistics, "")):
        report = compare(lambda k=kind: LossInside(k), packed=False)  # type: ignore[misc]
        assert any(reason in text for text in report["off"]), report
    say("decoders_that_keep_their_padding")
