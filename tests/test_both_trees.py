"""From fit to export, for a module that knows one Lightning only, in a process where only that one exists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
# importable name of the tree -> what must not be there
OTHER = {"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}


@pytest.mark.parametrize("tree", OTHER)
def test_the_whole_path_in_one_tree(tree: str, tmp_path: Path) -> None:
    env = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "PATH": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, __file__, tree, str(tmp_path)], capture_output=True, text=True, timeout=150, env=env
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found["plain"]) == 6
    assert found["accelerated"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["resumed"] == pytest.approx(found["plain"][3:], rel=1e-5)
    assert found["validated"] == pytest.approx(found["plain_validated"], rel=1e-5)
    assert found["packed_calls"] > 0 < found["fused_calls"]
    assert found["exported"] < 1e-5
    assert found["loaded_without_us"] < 1e-5


def main(tree: str, directory: Path) -> dict[str, Any]:
    for name in [OTHER[tree], *(["lightning_fabric"] if tree == "lightning" else [])]:
        sys.modules[name] = None  # type: ignore[assignment]  # as if it was not installed
    import importlib

    import torch
    from transformers import AutoModelForCausalLM

    pl = importlib.import_module("lightning.pytorch" if tree == "lightning" else tree)
    module_of = importlib.import_module(f"only_{tree}")

    def trainer(**options: Any) -> Any:
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        return pl.Trainer(accelerator="cpu", devices=1, max_epochs=2, default_root_dir=directory, **quiet, **options)

    def accelerated(**options: Any) -> Any:
        callbacks = [LigerCallback(verbose=False), *options.pop("callbacks", [])]
        return trainer(strategy=strategy_class(pl.__name__)(bf16=False), callbacks=callbacks, **options)

    plain = module_of.TinyModule()
    plain_trainer = trainer(enable_checkpointing=False)
    plain_trainer.fit(plain, module_of.TinyData())
    validated = plain_trainer.validate(plain, module_of.TinyData())

    from lightning_liger import LigerCallback
    from lightning_liger.parallel.export import export_checkpoint
    from lightning_liger.strategy import strategy_class

    module, saving = module_of.TinyModule(), pl.callbacks.ModelCheckpoint(save_top_k=-1, filename="{step}")
    first = accelerated(callbacks=[saving])
    first.fit(module, module_of.TinyData())
    report = first.callbacks[0].report
    (middle,) = directory.rglob("step=3.ckpt")
    resumed = module_of.TinyModule()
    second = accelerated(enable_checkpointing=False)
    second.fit(resumed, module_of.TinyData(), ckpt_path=str(middle), weights_only=False)
    (metrics,) = second.validate(resumed, module_of.TinyData())
    second.save_checkpoint(directory / "last.ckpt")
    export_checkpoint(directory / "last.ckpt", directory / "exported")

    ids = torch.arange(1, 9)[None]
    expected = plain.model(ids).logits
    exported = AutoModelForCausalLM.from_pretrained(directory / "exported")(ids).logits
    loaded = module_of.TinyModule.load_from_checkpoint(directory / "last.ckpt", weights_only=False).model(ids).logits
    return {
        "plain": plain.losses,
        "accelerated": module.losses,
        "resumed": resumed.losses,
        "plain_validated": validated[0]["val_loss"],
        "validated": metrics["val_loss"],
        "packed_calls": report.padding.packed_calls,
        "fused_calls": report.head.fused_calls,
        "exported": float((exported - expected).abs().max() / expected.abs().max()),
        "loaded_without_us": float((loaded - expected).abs().max() / expected.abs().max()),
    }


if __name__ == "__main__":
    print("\n" + json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
