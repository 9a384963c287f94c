"""A group has one batch, or is told that it has not; what cannot be divided is refused."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import modules
import numpy as np
import own_modules
import torch
import transformers
from helpers import causal_lm
from runs import ACCELERATOR, QUIET, RANK, WORLD, raised, report_of
from sequence_runs import case, everywhere, fit, rows, saved, say
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_liger import LigerFSDPStrategy

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
    text = raised(ValueError, lambda: fit(modules.InInit(), stream, WORLD))
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
        assert seen[::2] == seen[1::2] and sorted(n for each in seen[::2] for n in each) == everything, seen
        assert any("by turns" in note for note in report_of(run)["notes"]) == (ranks == WORLD)
        data = StatefulDataLoader(Stream(by, ranks), batch_size=1, collate_fn=modules.collate)
        budget = {"max_tokens_per_batch": 24}
        with saved(2) as (folder, saver):
            fit(first := Sums(), data, 2, liger=budget, callbacks=[saver], enable_checkpointing=True, max_steps=2)
            data = StatefulDataLoader(Stream(by, ranks), batch_size=1, collate_fn=modules.collate)
            fit(rest := Sums(), data, 2, liger=budget, ckpt_path=folder / "step=2.ckpt")
        seen = everywhere(first.seen + rest.seen)
        read = [n for each in seen[::2] for n in each]
        assert seen[::2] == seen[1::2] and len(set(read)) == len(read), seen
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
    groups = [drawn[i : i + 2] for i in range(0, WORLD, 2)]
    assert all(a == b for a, b in groups) and len({tuple(a) for a, _ in groups}) == len(groups), drawn
    # the order of the second epoch is drawn from what the first has left behind
    data: Any = modules.rows(16)
    shuffled = DataLoader(data, batch_size=4, collate_fn=modules.collate, shuffle=True)
    fit(Noisy(), shuffled, 2, use_distributed_sampler=False, max_epochs=2)
    say("a group draws the same random numbers, another group others")


@case
def prediction_is_not_divided() -> None:
    class Predicts(modules.InInit):
        def predict_step(self, batch: Any) -> Any:
            return batch["input_ids"].sum(1).tolist()

    strategy = LigerFSDPStrategy(bf16=False, sequence_parallel_size=2)
    trainer = L.Trainer(
        accelerator=ACCELERATOR, devices=WORLD, strategy=strategy, **{**QUIET, "use_distributed_sampler": True}
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
        f"sequence_parallel_size=3 does not divide the {WORLD} processes of this job (devices × num_nodes). Use one", 3
    )
    refused(f"does not divide the {WORLD // 2} processes that hold one copy", WORLD, strategy={"replicate_size": 2})
    refused("padding_free=False. Drop one of the two", 2, liger={"padding_free": False})
    odd = modules.InInit()
    odd.model = causal_lm("llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=1)
    refused("LlamaModel has 3, with 1 of keys and values. Use one of 1, 3.", 2, odd)
    refused("no transformers model was found in the module", 2, own_modules.OneLinear())
    state = modules.InInit()
    state.model = bloom()
    refused("BloomModel", 2, state)
    say("what cannot be divided is an error that names the option")


def bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(config)
