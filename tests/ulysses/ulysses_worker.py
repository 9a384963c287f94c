"""Four processes, run by ``torchrun``: steps with tokens divided among two and four ranks against one process."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import modules
import sequence_runs
import sliced_steps as s
import torch
import torch.distributed as dist
import torch.nn as nn
from cases import run_cases
from helpers import leave, relative_all
from runs import RANK, WORLD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_liger.accelerate import Accelerated, accelerate
from lightning_liger.sequence import SequenceGroup
from lightning_liger.settings import Settings
from lightning_liger.tuning import blocks

CASES: dict[str, Callable[[], str]] = {}
GROUPS: dict[int, SequenceGroup] = {}


@dataclass(frozen=True)
class Case:
    """``step`` on ``make()`` and ``data()``; relative differences in double precision, and in fp32 to one rank.

    Attributes:
        exact: in double precision, to the plain module; None where that cannot run in it, or computes in fp32.
        thorough: two and four ranks in both precisions, and not four in double and two in single.
    """

    make: Callable[[], Any]
    step: Callable[[Any, s.Batch], Any]
    data: Callable[[], s.Batch] = s.batch
    exact: float | None = 1e-12
    thorough: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def group(k: int) -> SequenceGroup:
    if k not in GROUPS:
        made = [dist.new_group(list(range(first, first + k))) for first in range(0, WORLD, k)]
        GROUPS[k] = SequenceGroup.of(made[RANK // k])
    return GROUPS[k]


def run(module: nn.Module, case: Case, *, averaged: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients, averaged over all ranks as a strategy does."""
    loss = case.step(module, case.data())
    loss.backward()
    found = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    for gradient in found.values() if averaged else ():
        dist.all_reduce(gradient)
        gradient /= WORLD
    return float(loss.detach()), found


def divided(case: Case, dtype: torch.dtype, k: int | None) -> tuple[float, dict[str, torch.Tensor], Accelerated]:
    module = case.make().to(dtype)
    accelerated = accelerate(module, Settings(**case.settings), None if k is None else group(k))
    loss, gradients = run(module, case, averaged=k is not None)
    return loss, gradients, accelerated


def check(case: Case) -> str:
    said = []
    for dtype in (torch.float64, torch.float32):
        if dtype == torch.float64:
            if case.exact is None:
                continue
            expected = run(case.make().to(dtype), case, averaged=False)
            bound = case.exact
        else:
            expected, bound = divided(case, dtype, None)[:2], 1e-6
        for k in (2, 4) if case.thorough or case.exact is None else (4,) if dtype == torch.float64 else (2,):
            loss, gradients, accelerated = divided(case, dtype, k)
            padding = accelerated.report.padding
            assert 0 < padding.calls == padding.packed_calls, padding
            losses = [0.0] * WORLD
            dist.all_gather_object(losses, loss)
            assert len(set(losses)) == 1, losses
            worst = max(abs(loss - expected[0]) / abs(expected[0]), relative_all(gradients, expected[1]))
            assert worst <= bound, (dtype, k, loss, expected[0], relative_all(gradients, expected[1]))
            said.append(f"{worst:.0e}")
    return " ".join(said)


def compare(
    name: str, make: Callable[[], Any], step: Callable[[Any, s.Batch], Any], *args: Any, **options: Any
) -> None:
    CASES[name] = lambda: check(Case(make, step, *args, **options))


FP32 = 1e-6  # the model itself computes its loss, or something else, in fp32

for kind, tolerance in (("llama", 1e-12), ("qwen2", 1e-12), ("mistral", 1e-12), ("gpt2", 1e-12), ("gemma2", None)):
    compare(f"{kind} labels=", lambda kind=kind: s.model(kind), s.by_labels, exact=tolerance and FP32)
    compare(f"{kind} own loss", lambda kind=kind: s.model(kind), s.own_loss, exact=tolerance, thorough=True)
compare("gpt_oss: sinks, windows, experts", lambda: s.model("gpt_oss"), s.own_loss, exact=None)
compare("mixtral", lambda: s.model("mixtral"), s.own_loss, exact=None)
compare("eager attention", lambda: s.model("llama", attn_implementation="eager"), s.own_loss)
compare("preference", s.Preference, s.preference, s.pairs, thorough=True)
compare("preference of two calls, and a divergence", s.Preference, s.concatenated, s.pairs)
compare("weights and smoothing", lambda: s.model("llama"), s.weighted_loss)
compare("readers", lambda: s.model("llama"), s.readers, exact=FP32)
compare("hidden states", lambda: s.model("llama"), s.hidden_states)
compare("values and rewards", s.Valued, s.values_and_rewards)
compare("classified", lambda: s.of_class("AutoModelForSequenceClassification", num_labels=2), s.in_sequence, exact=FP32)
compare(
    "tokens classified", lambda: s.of_class("AutoModelForTokenClassification", num_labels=2), s.by_token, exact=FP32
)
compare("two backbones", s.Both, s.both)
compare("left padding", lambda: s.model("llama"), s.own_loss, lambda: s.batch(side="left"))
compare("packed, by positions", lambda: s.model("llama"), s.own_loss, s.packed, exact=None)
compare("packed, numbered", lambda: s.model("llama"), s.own_loss, lambda: s.packed(True), exact=None)
compare("no padding", lambda: s.model("llama"), s.own_loss, lambda: s.batch(1))
compare("accumulated", lambda: s.model("qwen2"), s.accumulated)
compare("fewer labels than ranks", lambda: s.model("qwen2"), s.few_labels)
compare("validated before", lambda: s.model("qwen2"), s.evaluated)
compare("recomputed", lambda: s.recomputed(False), s.own_loss)
compare("recomputed, reentrant", lambda: s.recomputed(True), s.own_loss)
compare("the head recomputed", lambda: s.model("llama"), s.recomputed_loss)
compare("adapters", lambda: s.adapted(target_modules=["q_proj", "down_proj"]), s.own_loss)
compare(
    "adapters and a trained head",
    lambda: s.adapted(target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"]),
    s.own_loss,
)
compare("buckets", lambda: s.model("llama"), s.own_loss, settings={"shape_buckets": True})
compare("without the fused head", lambda: s.model("llama"), s.own_loss, settings={"fused_head": False})


def case(function: Callable[[], str]) -> Callable[[], str]:
    CASES[function.__name__.replace("_", " ")] = function
    return function


class Operations(TorchDispatchMode):
    """Counts those of matrix products; torch's own counter hooks onto what modules return, which reads it."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=output)
        return output


@case
def every_rank_computes_its_share() -> str:
    def operations(k: int | None) -> int:
        module = s.model("llama", intermediate_size=256)
        accelerate(module, Settings(), None if k is None else group(k))
        with Operations() as counted:
            s.own_loss(module, s.batch(8)).backward()
        return counted.total

    alone = operations(None)
    shares = [operations(k) / alone for k in (2, 4)]
    assert shares[0] < 0.56 and shares[1] < 0.31, shares
    return f"{shares[0]:.2f} and {shares[1]:.2f} of the operations"


@case
def all_labels_ignored() -> str:
    module = s.model("llama")
    accelerate(module, Settings(), group(2))
    b = s.batch()
    loss = s.own_loss(module, {**b, "labels": torch.full_like(b["labels"], -100)})
    loss.backward()
    assert loss.isnan() and all(not p.grad.any() for p in module.parameters() if p.grad is not None)
    return "a mean of nothing"


@case
def what_cannot_be_divided_runs_whole() -> str:
    normalised = s.model("llama")
    normalised.model.layers[0].mlp.down_proj = nn.Sequential(normalised.model.layers[0].mlp.down_proj)
    normalised.model.layers[0].mlp.extra = nn.BatchNorm1d(4)
    hooked = s.model("llama")
    hooked.model.layers[0].register_forward_hook(seen)
    for module, reason in ((normalised, "BatchNorm1d takes the mean over all tokens"), (hooked, "would see a slice")):
        plain = run(copy.deepcopy(module), Case(nn.Module, s.own_loss), averaged=False)
        accelerated = accelerate(module, Settings(), group(2))
        found = run(module, Case(nn.Module, s.own_loss), averaged=True)
        assert any(reason in line for line in accelerated.report.padding.off), accelerated.report.padding.off
        assert abs(found[0] - plain[0]) <= 1e-6 * plain[0] and relative_all(found[1], plain[1]) <= 1e-6
    return "and says why"


def seen(module: Any, args: Any, output: Any) -> None:
    return None


seen.__module__ = "users_code"


@case
def heads_that_cannot_be_divided() -> str:
    module = s.model("llama", hidden_size=48, num_attention_heads=6)
    accelerated = accelerate(module, Settings(), group(4))
    s.own_loss(module, s.batch()).backward()
    (reason,) = accelerated.report.padding.off
    assert "6 attention heads, with 2 of keys and values, cannot be divided among 4 ranks" in reason, reason
    return reason


@case
def recorded_blocks_are_refused() -> str:
    try:
        accelerate(s.model("llama"), Settings(compile="cudagraphs"), group(2))
    except ValueError as error:
        assert "compile='cudagraphs' does not work together with sequence_parallel_size" in str(error)
        return "with the remedy"
    raise AssertionError("not refused")


# -- through a Trainer ---------------------------------------------------------------------------------------------------


def trained(name: str, make: Callable[[], Any], ks: tuple[int, ...] = (2,), **options: Any) -> None:
    def check() -> str:
        said = []
        for k in ks:
            strategy = options.get("strategy", {})
            own = {n: v for n, v in options.items() if n != "strategy"}
            groups = WORLD // k
            found = sequence_runs.fit(make(), sequence_runs.rows(groups), k, strategy=strategy, **own)
            expected = sequence_runs.fit(make(), sequence_runs.rows(0), **own)
            padding = next(c.report for c in found.trainer.callbacks if hasattr(c, "report")).padding
            assert padding.packed_calls, padding
            said.append(f"k={k}: {sequence_runs.same(found, expected)}")
        return "; ".join(said)

    CASES[name] = check


trained("fit: recomputed", modules.InInit, strategy={"activation_checkpointing": "full"}, gradient_clip_val=0.5)
trained("fit: selectively", lambda: modules.InInit("llama"), strategy={"activation_checkpointing": "selective"})


@case
def fit_compiled() -> str:
    blocks._BACKEND = "aot_eager"
    found = sequence_runs.fit(modules.InInit("llama"), sequence_runs.rows(2), 2, liger={"compile": True})
    expected = sequence_runs.fit(modules.InInit("llama"), sequence_runs.rows(0))
    ran = found.report["decoder_blocks"]
    assert ran["applied"] == 2 and not ran["off"], ran
    return sequence_runs.same(found, expected)


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    dist.init_process_group("gloo")
    run_cases(CASES, names)


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
