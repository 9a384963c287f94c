"""Two processes, run by ``torchrun`` (or one, run as it is): the equivalence proof of modules that FSDP2 shards."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import run_cases
from helpers import QUIET, Plain, Recorder, Run, causal_lm, collate, documents, leave
from lightning.pytorch.strategies import ModelParallelStrategy
from test_equivalence import Everything, OwnFunction, Preference, _one_document
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerFSDPStrategy
from lightning_liger.padding import attention
from lightning_liger.proof.report import ProofError

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ACCELERATOR = os.environ.get("TEST_ACCELERATOR", "cpu")
CASES: dict[str, Callable[[], str]] = {}


def case(function: Callable[[], str]) -> Callable[[], str]:
    CASES[function.__name__] = function
    return function


def train(module: Any, verify: Any, strategy: Any = None, padding_free: bool = True, **options: Any) -> Run:
    """On other documents on each rank."""
    run, ours = Run(), LigerCallback(verbose=False, verify=verify, padding_free=padding_free)
    trainer = L.Trainer(
        callbacks=[Recorder(run), ours],
        strategy=strategy or LigerFSDPStrategy(bf16=False),
        **{
            **QUIET,
            "accelerator": ACCELERATOR,
            "devices": WORLD,
            "use_distributed_sampler": False,
            **options,
        },
    )
    data: Any = documents(16, seed=RANK)
    trainer.fit(module, DataLoader(data, batch_size=4, collate_fn=collate))
    run.parameters = {n: _whole(p) for n, p in module.named_parameters()}
    run.report = ours.report.to_dict()
    return run


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value) if dist.is_initialized() else found.__setitem__(0, value)
    return found


def agree(make: Callable[[], Any], verify: str = "strict", strategy: Any = None, **options: Any) -> dict[str, Any]:
    """Compared, alike on all ranks, and bit for bit the training without it."""
    runs = []
    for verified in ("off", verify):
        random.seed(RANK)
        torch.manual_seed(RANK)
        runs.append(train(make(), verified, None if strategy is None else strategy(), **options))
    without, run = runs
    found: dict[str, Any] = run.report["proof"]["equivalence"]
    assert found["agreement"] is not None and not found["skipped"] and not found["mismatch"], found
    assert len({str(a) for a in everywhere(found["agreement"])}) == 1, everywhere(found["agreement"])
    assert found["agreement"]["gradient_difference"] < max(3e-6, 2.5 * found["agreement"]["own_gradient"]), found
    assert found["agreement"]["gradient_norm"][0] > 0.01, found
    # kernels of a GPU may add up in any order
    exact: dict[str, float] = {"rtol": 0, "atol": 0} if ACCELERATOR == "cpu" else {}
    torch.testing.assert_close(run.losses, without.losses, **exact)
    torch.testing.assert_close(run.parameters, without.parameters, **exact)
    for before, after in zip(without.gradients, run.gradients, strict=True):
        torch.testing.assert_close(
            {n: _whole(g) for n, g in after.items()}, {n: _whole(g) for n, g in before.items()}, **exact
        )
    return found


def said(found: dict[str, Any]) -> str:
    agreement = found["agreement"]
    return f"{agreement['gradient_difference']:.1e} apart, own {agreement['own_gradient']:.1e}, {found['part']}"


@case
def tied() -> str:
    return said(agree(lambda: Plain(causal_lm("qwen2"))))


@case
def in_bf16() -> str:
    found = agree(lambda: Plain(causal_lm("llama")), strategy=lambda: LigerFSDPStrategy())
    assert found["agreement"]["own_gradient"] > 1e-4, "parameters are fp32, computed with is bf16"
    return said(found)


@case
def accumulating_and_resharding() -> str:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    return said(
        agree(
            lambda: Plain(causal_lm("gpt2", resid_pdrop=0.3)),
            strategy=lambda: LigerFSDPStrategy(bf16=False, reshard_after_forward=True),
            **options,
        )
    )


@case
def recomputed() -> str:
    strategy = lambda: LigerFSDPStrategy(bf16=False, activation_checkpointing="full")  # noqa: E731
    return said(agree(lambda: Plain(causal_lm("llama")), strategy=strategy))


@case
def whatever_a_step_does() -> str:
    return said(agree(Everything, padding_free=False))  # its accuracy counts padding, which no shard can give


@case
def preference() -> str:
    return said(agree(Preference))


@case
def autograd_functions() -> str:
    return said(agree(lambda: OwnFunction(causal_lm("llama")), "warn", padding_free=False))


class ByHand(Plain):
    """Its own root is in the middle of a forward when the first backward is over."""

    def __init__(self) -> None:
        super().__init__(causal_lm("llama"))
        self.automatic_optimization = False
        self.scale = torch.nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.model(**batch).loss * self.scale.mean()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss.detach()}


@case
def manual() -> str:
    return said(agree(ByHand))


@case
def by_hand_without_lightning() -> str:
    class Silent(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(**batch).loss
            loss.backward()
            self.optimizers().step()
            self.optimizers().zero_grad()
            return {"loss": loss.detach()}

    found = agree(Silent)
    assert "did not differentiate" in found["without_loss"]
    return said(found)


class OwnSharding(Plain):
    """As Lightning's documentation of its ModelParallelStrategy shows it; head and embedding are roots of their own."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        policy = MixedPrecisionPolicy(output_dtype=torch.float32)
        if not any(isinstance(p, DTensor) for p in self.parameters()):
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh, mp_policy=policy)


@case
def the_users_own_sharding() -> str:
    return said(agree(lambda: OwnSharding(causal_lm("llama")), strategy=lambda: ModelParallelStrategy()))


class SeparateLoss(Plain):
    """A sharded part behind the backbone, whose hooks are autograd functions."""

    def __init__(self) -> None:
        super().__init__(causal_lm("llama"))
        self.value = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def configure_model(self) -> None:
        if not any(isinstance(p, DTensor) for p in self.parameters()) and WORLD > 1:
            fully_shard(self.value, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model(batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
        loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        values = self.value(out.hidden_states[-1][batch["attention_mask"].bool()])
        return loss + 0.1 * values.square().mean()


@case
def a_sharded_part_behind_the_backbone() -> str:
    return said(agree(SeparateLoss))


@case
def a_mismatch_on_one_rank_is_everybodys() -> str:
    right = attention.by_torch
    attention.by_torch = _one_document if RANK == 0 else right
    try:
        message = ""
        try:
            train(Plain(causal_lm("llama")), "strict")
        except ProofError as error:
            message = str(error)
        assert "padding removal computes something else" in message, message
        assert len(set(everywhere(message))) == 1, everywhere(message)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = train(Plain(causal_lm("llama")), "warn").report
        assert found["proof"]["equivalence"]["switched_off"] == ["padding removal"], found
        assert found["padding_free"]["packed_calls"] == 1
    finally:
        attention.by_torch = right
    return "named, and switched off"


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run_cases(CASES, names)


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
