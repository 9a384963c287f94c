"""Trainings in groups that share a batch, each against one process: what is trained is the same."""

from __future__ import annotations

from typing import Any

import lightning as L
import modules
from helpers import Run, documents
from helpers import collate as collate_documents
from resuming import Batches, Hard
from runs import RANK, WORLD, distance, report_of
from sequence_runs import EXACT, SIZES, case, everywhere, fit, mean_over_ranks, rows, same, saved, say
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric


class Logged(modules.InInit):
    """Logs, gathers and counts over ranks, as people do."""

    def __init__(self, kind: str = "qwen2") -> None:
        super().__init__(kind)
        self.count = SumMetric()
        self.gathered: list[int] = []
        self.rows: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.rows += batch["input_ids"].sum(1).tolist()
        self.log("sum", batch["attention_mask"].sum().float(), sync_dist=True, reduce_fx="sum")
        self.log("mean", loss, sync_dist=True, on_step=True)
        self.count(len(batch["input_ids"]))
        self.log("count", self.count, on_epoch=True, on_step=False)
        self.gathered.append(len(self.all_gather(loss.detach()).reshape(-1)))
        return loss


def _trains_as_one(k: int, kind: str = "qwen2", **options: Any) -> None:
    groups = WORLD // k
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **options}
    data = rows(groups), rows(0)
    run = fit(module := Logged(kind), data[0], k, val=data[0], **options)
    reference = fit(Logged(kind), data[1], val=data[1], **{**options, "strategy": {}})
    text = same(run, reference)
    assert set(module.gathered) == {groups}, module.gathered
    assert run.metrics["count"] == 16  # torchmetrics in the plain process add up four of those
    for name in ("sum", "val_loss"):
        a, b = run.metrics[name], reference.metrics[name]
        assert abs(a - b) <= 1e-5 * abs(b), (name, a, b)
    seen = everywhere(module.rows)
    assert all(seen[r] == seen[r // k * k] for r in range(WORLD)), "a group has one batch"
    assert len({x for r in range(0, WORLD, k) for x in seen[r]}) == 16
    say(f"groups of {k}, {kind}: {text}")


@case
def groups_of_two() -> None:
    _trains_as_one(2)


@case
def one_group() -> None:
    _trains_as_one(WORLD, "llama")


@case
def whole_copies() -> None:
    _trains_as_one(WORLD // 2, strategy={"replicate_size": 2})


# -- tokens ------------------------------------------------------------------------------------------------------------


class Documents(Dataset[Any]):
    """Numbered, with prompts of all lengths, so that ranks and micro-batches hold different numbers of labels."""

    def __init__(self, count: int = 24) -> None:
        self.documents = documents(count, longest=24)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Any:
        return index, self.documents[index]


def numbered(batch: list[Any]) -> dict[str, Any]:
    return {"numbers": [n for n, _ in batch], **collate_documents([d for _, d in batch])}


class Counts(modules.InInit):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.append(batch.pop("numbers"))
        return self.model(**batch).loss


class Given(Dataset[Any]):
    """One batch of all documents of a step, whichever rank or micro-batch they were in."""

    def __init__(self, steps: list[list[int]]) -> None:
        self.steps, self.data = steps, Documents()

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> Any:
        return numbered([self.data[n] for n in self.steps[index]])


def flat(steps: list[list[int]]) -> list[int]:
    return [n for step in steps for n in step]


def together(module: Counts, k: int, accumulated: int = 1) -> list[list[int]]:
    """The documents of each optimizer step on all ranks, each once."""
    by_rank = everywhere(module.steps)
    assert all(by_rank[r] == by_rank[r // k * k] for r in range(WORLD))
    groups = by_rank[::k]
    steps = [[n for group in groups for n in group[i]] for i in range(len(module.steps))]
    return [flat(steps[i : i + accumulated]) for i in range(0, len(steps), accumulated)]


def same_weights(run: Run, steps: list[list[int]], **options: Any) -> str:
    """One process that takes the mean over all labels of each step."""
    reference = fit(Counts(), DataLoader(Given(steps), batch_size=None), **options)
    weight = distance(run.parameters, reference.parameters)
    assert weight <= EXACT, weight
    return f"weights {weight:.1e} over {len(steps)} steps"


@case
def losses_count_by_their_labels() -> None:
    for k in SIZES:
        data = DataLoader(Documents(), batch_size=2 * k // 2, collate_fn=numbered, shuffle=True)
        run = fit(module := Counts(), data, k, liger={"loss_normalization": "tokens"}, accumulate_grad_batches=2)
        steps = together(module, k, accumulated=2)
        assert sorted(flat(steps)) == list(range(24)), steps
        say(f"token weights in groups of {k}: {same_weights(run, steps)}")


BUDGET: dict[str, Any] = {"max_tokens_per_batch": 60, "loss_normalization": "tokens"}


@case
def batches_by_tokens() -> None:
    data = DataLoader(Documents(), batch_size=2, collate_fn=numbered, shuffle=True)
    with saved(1) as (folder, saver):
        run = fit(whole_run := Counts(), data, 2, liger=BUDGET, callbacks=[saver], enable_checkpointing=True)
        steps = together(whole_run, 2)
        assert sorted(flat(steps)) == list(range(24)) and len(steps) > 2, steps
        say(f"token batches in groups of 2: {same_weights(run, steps)}")
        meter = report_of(run)["token_batches"]
        assert meter["samples"] == 24 and meter["steps"] == len(steps), meter
        for k in (*SIZES, 1):
            resumed = fit(module := Counts(), data, k, liger=BUDGET, ckpt_path=folder / "step=1.ckpt")
            rest = together(module, k)
            assert sorted(steps[0] + flat(rest)) == list(range(24)), (steps, rest)
            say(f"resumed in the middle of an epoch in groups of {k}: {same_weights(resumed, [steps[0], *rest])}")


class TokensOfSteps(L.Callback):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        metrics = trainer.callback_metrics
        self.tokens.append(round(float(metrics["liger/tokens_per_second"] * metrics["liger/step_seconds"])))


@case
def work_is_counted_once() -> None:
    def meter(k: int, groups: int) -> tuple[list[int], dict[str, Any]]:
        counted = TokensOfSteps()
        run = fit(modules.InInit(), rows(groups), k, liger={}, callbacks=[counted], log_every_n_steps=1)
        return counted.tokens, report_of(run)["meter"]

    tokens, alone = meter(0, 0)
    assert len(tokens) == 4 and tokens == meter(2, WORLD // 2)[0]
    found, together = meter(WORLD, 1)
    assert found == tokens
    for name in ("model_flops", "attention_flops", "hardware_flops"):
        assert abs(together[name] / alone[name] - 1) < 0.02, (name, together[name], alone[name])
    say(f"a group's tokens and operations are counted once: {tokens} tokens, {together['model_flops']:.4g} operations")


# -- checkpoints -------------------------------------------------------------------------------------------------------


@case
def resumed_with_other_groups() -> None:
    def run(k: int, kind: str = "full", **options: Any) -> Run:
        rank, ranks = (RANK // k, WORLD // k) if k else (0, 1)
        common = {"strategy": {"state_dict_type": kind}, "max_epochs": 2, "use_distributed_sampler": False}
        return fit(Hard(), Batches(rank, ranks), k, **common, **options)

    reference = run(0)
    for kind, before, afterwards in (("full", 2, 1), ("full", WORLD, 2), ("sharded", 1, 2), ("sharded", 2, WORLD)):
        with saved(3) as (folder, saver):
            run(before, kind, callbacks=[saver], enable_checkpointing=True, max_steps=3)
            resumed = run(afterwards, kind, ckpt_path=folder / "step=3.ckpt")
        losses = mean_over_ranks(resumed.losses)
        loss = max(abs(a - b) / abs(b) for a, b in zip(losses, reference.losses[3:], strict=True))
        weight = distance(resumed.parameters, reference.parameters)
        found = f"loss {loss:.1e} weights {weight:.1e} over {len(losses)} steps"
        assert loss <= EXACT and weight <= EXACT, (kind, before, afterwards, found)
        say(f"{kind} checkpoint of groups of {before}, resumed in groups of {afterwards}: {found}")
