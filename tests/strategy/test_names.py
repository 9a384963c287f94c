"""How the strategy is asked for, what it refuses before anything starts, and one process with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import pytorch_lightning as pl
import torch
import yaml
from helpers import QUIET, Plain, assert_engaged, assert_same, causal_lm, fit, loader
from lightning.pytorch.cli import LightningCLI
from torch.distributed.tensor import DTensor

from lightning_liger import LigerCallback, LigerFSDPStrategy, LigerFSDPStrategyPL


def trainer(strategy: Any, tree: Any = L, **options: Any) -> Any:
    return tree.Trainer(**{**QUIET, "strategy": strategy, **options})


@pytest.mark.parametrize("tree", [L, pl])
@pytest.mark.parametrize("name", ["liger_fsdp", "liger_fsdp_offload", "liger_hsdp", "LIGER_FSDP"])
def test_names_work_in_both_trees(tree: Any, name: str) -> None:
    made = trainer(name, tree).strategy
    kind = LigerFSDPStrategy if tree is L else LigerFSDPStrategyPL
    assert type(made) is kind and isinstance(
        made, tree.pytorch.strategies.Strategy if tree is L else tree.strategies.Strategy
    )


@pytest.mark.parametrize("order", ["lightning_liger, lightning", "lightning, lightning_liger"])
def test_importing_registers_and_stays_cheap(order: str) -> None:
    first, second = order.split(", ")
    code = f"""
import sys
import {first}
if {first!r} == "lightning_liger":
    assert not any(m.split(".")[0] in ("lightning", "pytorch_lightning", "transformers") for m in sys.modules)
import {second}
import lightning, pytorch_lightning
for tree in (lightning, pytorch_lightning):
    made = tree.Trainer(strategy="liger_fsdp", accelerator="cpu", devices=1, logger=False)
    assert type(made.strategy).__name__.startswith("LigerFSDPStrategy")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, timeout=100)


def test_an_instance_for_the_other_tree_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"for a Trainer of lightning\.pytorch; strategy='liger_fsdp' fits any Trainer"
    ):
        trainer(LigerFSDPStrategy(), pl)


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_other_precisions_are_refused_by_name(precision: str) -> None:
    with pytest.raises(ValueError, match=rf"precision='{precision}'.*bf16-mixed.*bf16=False"):
        trainer("liger_fsdp", precision=precision)


@pytest.mark.parametrize(
    ("precision", "bf16", "name"),
    [
        ("32-true", True, "bf16-mixed"),
        ("32-true", False, "32-true"),
        ("bf16-mixed", False, "bf16-mixed"),
        ("bf16-true", True, "bf16-true"),
    ],
)
def test_precisions(precision: str, bf16: bool, name: str) -> None:
    assert trainer(LigerFSDPStrategy(bf16=bf16), precision=precision).precision == name


def test_what_would_be_ignored_is_refused() -> None:
    class Own(L.pytorch.plugins.Precision):
        pass

    with pytest.raises(ValueError, match="Own does not fit the liger_fsdp strategy"):
        trainer("liger_fsdp", plugins=[Own()])
    with pytest.raises(ValueError, match="sync_batchnorm"):
        trainer("liger_fsdp", sync_batchnorm=True).fit(Plain(causal_lm()), loader())


def test_sizes_are_checked_before_processes_start() -> None:
    with pytest.raises(ValueError, match=r"replicate_size=3 does not divide the 4 processes.*1, 2, 4"):
        trainer(LigerFSDPStrategy(replicate_size=3), devices=4)
    for wrong in (0, 1.5, "node"):
        with pytest.raises(ValueError, match="replicate_size"):
            LigerFSDPStrategy(replicate_size=wrong)


def test_one_process_trains_as_without_and_gets_its_module_back(tmp_path: Path) -> None:
    plain, ours = (
        fit(Plain(causal_lm()), loader(), callback, strategy=strategy, gradient_clip_val=0.5)
        for callback, strategy in ((None, "auto"), (LigerCallback(verbose=False), LigerFSDPStrategy(bf16=False)))
    )
    assert_engaged(ours)
    assert not any(isinstance(p, DTensor) for p in ours.parameters.values())
    ours.gradients = [{n: g.full_tensor() for n, g in step.items()} for step in ours.gradients]  # type: ignore[attr-defined]
    assert_same(plain, ours)
    module = ours.trainer.lightning_module
    assert type(module) is Plain and module.model.lm_head.weight is module.model.model.embed_tokens.weight
    ours.trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["state_dict"].keys() == module.state_dict().keys()
    momentum = saved["optimizer_states"][0]["state"]
    assert all(type(state["momentum_buffer"]) is torch.Tensor for state in momentum.values())
    # and goes on from there
    fit(module, loader(), strategy="liger_fsdp", callbacks=[LigerCallback(verbose=False)])


@pytest.mark.parametrize(
    "strategy",
    ["liger_fsdp", {"class_path": "lightning_liger.LigerFSDPStrategy", "init_args": {"bf16": False}}],
)
def test_command_lines(tmp_path: Path, strategy: Any) -> None:
    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

    class Module(Plain):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(causal_lm(), lr)

    callbacks = [{"class_path": "lightning_liger.LigerCallback", "init_args": {"verbose": False}}]
    settings = {"trainer": {**QUIET, "strategy": strategy, "callbacks": callbacks}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    cli = LightningCLI(Module, Data, args=["fit", "--config", str(file)], save_config_callback=None)
    assert isinstance(cli.trainer.strategy, LigerFSDPStrategy) and cli.trainer.global_step == 4
