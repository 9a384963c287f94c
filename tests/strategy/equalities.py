"""What is sharded over all ranks trains as it does on one process with the same global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import modules
import own_modules
import pytorch_lightning as pl
from runs import CASES, WORLD, distance, mean_over_ranks, say, train, whole

from lightning_liger import LigerFSDPStrategy, LigerFSDPStrategyPL


def compare(name: str, make: Callable[[], Any], *, tree: Any = L, strategy: Any = None, **options: Any) -> None:
    kind = LigerFSDPStrategy if tree is L else LigerFSDPStrategyPL
    one = train(make(), 1, "auto", [], tree, **options)
    start = whole(dict(make().named_parameters())) if name != "configure_model" else {}
    two = train(make(), WORLD, kind(**{"bf16": False, **(strategy or {})}), [], tree, **options)
    losses = mean_over_ranks(two.losses)
    for metric, value in one.metrics.items():
        assert abs(two.metrics[metric] - value) <= 2e-5 * max(abs(value), 1), (metric, one.metrics, two.metrics)
    worst = max(abs(a - b) / abs(a) for a, b in zip(one.losses, losses, strict=True))
    parameter = distance(two.parameters, one.parameters)
    moved = distance(one.parameters, start) if start else 1.0
    found = f"loss {worst:.1e} parameter {parameter:.1e} (moved by {moved:.1e} in {len(losses)} steps)"
    assert worst <= 1e-5 and parameter <= 1e-5, f"{found}\n{one.losses}\n{losses}"
    assert moved > 1e-3, found
    say(f"{name}: {found}")


def _same(name: str, make: Callable[[], Any], **options: Any) -> None:
    CASES[name] = lambda: compare(name, make, **options)


_same("in_init_tied", modules.InInit)
_same("in_init_untied", lambda: modules.InInit("llama"))
_same("in_setup", modules.InSetup, strategy={"reshard_after_forward": False})
_same("configure_model", modules.InConfigureModel)
_same("own_sharding", modules.OwnSharding)
_same("own_loss_through_self", modules.OwnLoss)
_same("norms", modules.Norms, gradient_clip_val=0.5)
_same("metrics", modules.Metrics)
_same("adapters", modules.Adapters)
_same("manual_and_clipped", modules.Manual)
_same("accumulate_and_clip", modules.InInit, accumulate_grad_batches=4, gradient_clip_val=0.5)
_same("clip_by_value", modules.InInit, gradient_clip_val=0.002, gradient_clip_algorithm="value")
_same("policy_and_reference", modules.PolicyAndReference)
_same("on_the_module", modules.OnTheModule, gradient_clip_val=0.5)
_same("two_optimizers", modules.TwoOptimizers)
_same("is_the_model", own_modules.IsTheModel)
_same("is_the_model_manual", lambda: own_modules.IsTheModel(manual=True))
_same("no_blocks", lambda: own_modules.IsTheModel(blocks=1))
_same("no_blocks_manual", lambda: own_modules.IsTheModel(blocks=1, manual=True))
_same("one_linear_manual", own_modules.OneLinear)
_same("manual_on_the_module", modules.ManualOnTheModule)
_same("chosen_experts", own_modules.ChoosesExperts)
_same("thawed", modules.Thawed)
_same("experts", modules.Experts)
_same("pytorch_lightning", modules.InInitPL, tree=pl)
_same("offload", modules.InInit, strategy={"offload": True})
