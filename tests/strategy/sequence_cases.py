"""Ranks that share a batch, in four processes: trainings with groups of two and of four against one plain process."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import modules
import numpy as np
import own_modules
import torch
import torch.distributed as dist
import transformers
from helpers import Recorder, Run, causal_lm, documents
from helpers import collate as collate_documents
from lightning.pytorch.callbacks import ModelCheckpoint
from resuming import Batches, Hard
from runs import QUIET, RANK, WORLD, distance, raised, report_of, whole
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import SumMetric

from lightning_liger import LigerCallback, LigerFSDPStrategy

EXACT = 1e-6
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def rows(ranks: int, count: int = 16) -> DataLoader[Any]:
    """Four rows a step on any number of ranks, in order, by a sampler that counts all of them."""
    data: Any = modules.rows(count)
    sampler: Any = DistributedSampler(data, WORLD, RANK, shuffle=False) if ranks else None
    return DataLoader(data, batch_size=4 // max(ranks, 1), collate_fn=modules.collate, sampler=sampler)


def fit(
    module: Any, data: Any, k: int = 0, *, ckpt_path: Any = None, liger: Any = None, val: Any = None, **options: Any
) -> Run:
    """Train on all four ranks with groups of ``k``, or in this process alone (``k=0``), plain without ``liger``."""
    run = Run()
    callbacks = [Recorder(run), *options.pop("callbacks", [])]
    if k:
        strategy: Any = LigerFSDPStrategy(bf16=False, sequence_parallel_size=k, **options.pop("strategy", {}))
    else:
        strategy = "auto"
        options.pop("strategy", None)
    if k or liger is not None:
        callbacks.insert(1, LigerCallback(verbose=False, **(liger or {})))
    quiet = {**QUIET, "use_distributed_sampler": True, "accelerator": "cpu"}
    trainer = L.Trainer(devices=WORLD if k else 1, strategy=strategy, callbacks=callbacks, **{**quiet, **options})
    run.trainer = trainer
    trainer.fit(module, data, val, ckpt_path=ckpt_path)
    run.parameters = whole(dict(module.named_parameters()))
    run.metrics = {n: float(v) for n, v in trainer.callback_metrics.items() if not n.startswith("liger/")}
    return run


def mean_over_ranks(values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return (tensor / WORLD).tolist()


def same(run: Run, reference: Run) -> str:
    losses = mean_over_ranks(run.losses)
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, reference.losses, strict=True))
    weight = distance(run.parameters, reference.parameters)
    found = f"loss {loss:.1e} weights {weight:.1e} over {len(losses)} steps"
    assert loss <= EXACT and weight <= EXACT, found
    return found


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def say(text: str) -> None:
    if RANK == 0:
        print(f"ok {text}", flush=True)


# -- equal to one process ----------------------------------------------------------------------------------------------


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
def two_groups_of_two() -> None:
    _trains_as_one(2)


@case
def one_group_of_four() -> None:
    _trains_as_one(4, "llama")


@case
def whole_copies_of_two_ranks() -> None:
    _trains_as_one(2, strategy={"replicate_size": 2})


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
    for k in (2, 4):
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
        for k in (4, 2, 1):
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
    assert len(tokens) == 4 and tokens == meter(2, 2)[0]
    found, together = meter(4, 1)
    assert found == tokens
    for name in ("model_flops", "attention_flops", "hardware_flops"):
        assert abs(together[name] / alone[name] - 1) < 0.02, (name, together[name], alone[name])
    say(f"a group's tokens and operations are counted once: {tokens} tokens, {together['model_flops']:.4g} operations")


# -- checkpoints -------------------------------------------------------------------------------------------------------


class saved:
    """A folder that every rank sees, and what saves into it every few steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def __enter__(self) -> tuple[Path, ModelCheckpoint]:
        self.folder = Path(everywhere(tempfile.mkdtemp())[0])
        options: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": self.every}
        return self.folder, ModelCheckpoint(self.folder, "{step}", **options)

    def __exit__(self, *_: Any) -> None:
        dist.barrier()
        if RANK == 0:
            shutil.rmtree(self.folder)


@case
def resumed_with_other_groups() -> None:
    def run(k: int, kind: str = "full", **options: Any) -> Run:
        rank, ranks = (RANK // k, WORLD // k) if k else (0, 1)
        common = {"strategy": {"state_dict_type": kind}, "max_epochs": 2, "use_distributed_sampler": False}
        return fit(Hard(), Batches(rank, ranks), k, **common, **options)

    reference = run(0)
    for kind in ("full", "sharded"):
        for before, afterwards in ((2, 1), (1, 2), (2, 4), (4, 2)):
            with saved(3) as (folder, saver):
                run(before, kind, callbacks=[saver], enable_checkpointing=True, max_steps=3)
                resumed = run(afterwards, kind, ckpt_path=folder / "step=3.ckpt")
            resumed.losses = [0.0] * 3 + resumed.losses
            losses = mean_over_ranks(resumed.losses)[3:]
            loss = max(abs(a - b) / abs(b) for a, b in zip(losses, reference.losses[3:], strict=True))
            weight = distance(resumed.parameters, reference.parameters)
            found = f"loss {loss:.1e} weights {weight:.1e} over {len(losses)} steps"
            assert loss <= EXACT and weight <= EXACT, (kind, before, afterwards, found)
            say(f"{kind} checkpoint of groups of {before}, resumed in groups of {afterwards}: {found}")


# -- a group has one batch, and one sequence of random numbers ---------------------------------------------------------


@case
def batches_that_differ_in_a_group() -> None:
    shuffled: Any = modules.rows(16)
    generator = torch.Generator().manual_seed(RANK)
    own = DataLoader(shuffled, batch_size=2, collate_fn=modules.collate, shuffle=True, generator=generator)
    text = raised(ValueError, lambda: fit(modules.InInit(), own, 2, use_distributed_sampler=False))
    mine = [RANK // 2 * 2, RANK // 2 * 2 + 1]
    assert f"Ranks {mine[0]}, {mine[1]} share one batch (sequence_parallel_size=2) and have different ones" in text, (
        text
    )
    assert "RandomSampler draws" in text and "use_distributed_sampler=True" in text and "seed_everything" in text, text
    counted: Any = Stream(RANK, WORLD)
    counted.__class__ = type("Counted", (Stream,), {"__len__": lambda self: 4})
    stream = DataLoader(counted, batch_size=2, collate_fn=modules.collate)
    text = raised(ValueError, lambda: fit(modules.InInit(), stream, 4))
    assert "Counted divides its stream by rank" in text and "distributed_sampler_kwargs" in text, text
    say("batches that differ in a group are an error")


class Stream(IterableDataset[Any]):
    """Divides itself among as many ranks as it is told, as streams do; knows where it is."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.at = rank, ranks, 0

    def __iter__(self) -> Any:
        rows, start = modules.rows(16)[self.rank :: self.ranks], self.at
        for self.at, row in enumerate(rows[start:], start + 1):
            yield row
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Sums(modules.InInit):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch["input_ids"].sum(1).tolist()
        return self.model(**batch).loss


@case
def streams() -> None:
    everything = sorted(int(row.sum()) for row in modules.rows(16))
    for by, ranks in ((RANK, WORLD), (RANK // 2, WORLD // 2)):
        run = fit(module := Sums(), DataLoader(Stream(by, ranks), batch_size=2, collate_fn=modules.collate), 2)
        seen = everywhere(module.seen)
        assert seen[0] == seen[1] and seen[2] == seen[3] and sorted(seen[0] + seen[2]) == everything, seen
        assert any("by turns" in note for note in report_of(run)["notes"]) == (ranks == WORLD)
        data = StatefulDataLoader(Stream(by, ranks), batch_size=1, collate_fn=modules.collate)
        budget = {"max_tokens_per_batch": 24}
        with saved(2) as (folder, saver):
            fit(first := Sums(), data, 2, liger=budget, callbacks=[saver], enable_checkpointing=True, max_steps=2)
            data = StatefulDataLoader(Stream(by, ranks), batch_size=1, collate_fn=modules.collate)
            fit(rest := Sums(), data, 2, liger=budget, ckpt_path=folder / "step=2.ckpt")
        seen = everywhere(first.seen + rest.seen)
        assert seen[0] == seen[1] and len(set(seen[0] + seen[2])) == len(seen[0] + seen[2]), seen
        say(f"a stream divided among {ranks} is read once, batches by tokens and a resume among them")


class Noisy(modules.InInit):
    """Draws in its step, and on one rank more than on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.drawn += [float(torch.rand(())), random.random(), float(np.random.rand())]
        if self.trainer.is_global_zero:
            torch.rand(3), random.random(), np.random.rand()
        return self.model(**batch).loss


@case
def random_numbers_of_the_user() -> None:
    random.seed(RANK)
    np.random.seed(RANK)
    torch.manual_seed(RANK)
    fit(module := Noisy(), rows(2), 2)
    drawn = everywhere(module.drawn)
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3] and not set(drawn[0]) & set(drawn[2]), drawn
    say("a group draws the same random numbers, another group others")


@case
def prediction_is_not_divided() -> None:
    class Predicts(modules.InInit):
        def predict_step(self, batch: Any) -> Any:
            return batch["input_ids"].sum(1).tolist()

    strategy = LigerFSDPStrategy(bf16=False, sequence_parallel_size=2)
    trainer = L.Trainer(
        accelerator="cpu", devices=WORLD, strategy=strategy, **{**QUIET, "use_distributed_sampler": True}
    )
    data: Any = modules.rows(16)
    module = Predicts()
    found = trainer.predict(module, DataLoader(data, batch_size=2, collate_fn=modules.collate))
    seen = everywhere([x for batch in found or [] for x in batch])
    assert len({x for each in seen for x in each}) == sum(map(len, seen)) == 16, seen
    trainer.validate(module, rows(2), verbose=False)
    say("each rank predicts rows of its own")


# -- what is refused ---------------------------------------------------------------------------------------------------


@case
def refused_before_anything_trains() -> None:
    def refused(text: str, k: int, module: Any = None, **options: Any) -> None:
        module = modules.InInit() if module is None else module
        steps: list[int] = []
        module.on_before_optimizer_step = lambda optimizer: steps.append(1)
        found = raised(ValueError, lambda: fit(module, rows(1), k, **options))
        assert text in found and not steps, found

    refused(
        "sequence_parallel_size=3 does not divide the 4 processes of this job (devices × num_nodes). Use one of 1,", 3
    )
    refused("does not divide the 2 processes that hold one copy of the model", 4, strategy={"replicate_size": 2})
    refused("padding_free=False. Drop one of the two", 2, liger={"padding_free": False})
    six = modules.InInit()
    six.model = causal_lm("llama", hidden_size=48, num_attention_heads=6)
    refused("LlamaModel has 6, with 2 of keys and values. Use one of 1, 2, 6.", 4, six)
    refused("no transformers model was found in the module", 2, own_modules.OneLinear())
    state = modules.InInit()
    state.model = bloom()
    refused("BloomModel", 2, state)
    say("what cannot be divided is an error that names the option")


def bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(config)
