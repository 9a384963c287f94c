"""Hugging Face exports of sharded modules that train, and of their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import modules
import pytest
import torch
import torch.distributed as dist
import transformers
from case_tools import KINDS, ROOT, at, case, fit, say
from helpers import VOCAB, causal_lm
from resuming import RANK, WORLD, Batches, Hard
from safetensors.torch import load_file

from lightning_liger.cli import export as export_command
from lightning_liger.cli.errors import CommandError
from lightning_liger.parallel import export


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w0")


class SaveAtEnd(L.Callback):
    """Exports while the module is sharded, after a validation has gathered its root."""

    def __init__(self, out: Path, **options: Any) -> None:
        self.out, self.options = out, options

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.save_hf(self.out, **self.options)


IDS = torch.arange(3, 43).view(2, 20)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


class WithTokenizer(Hard):
    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = tokenizer()


@case
def export_while_training() -> None:
    out, half = ROOT / "hf", ROOT / "hf-bf16"
    saving = [SaveAtEnd(out), SaveAtEnd(half, dtype="bfloat16", max_shard_size="20KB")]
    fit(WithTokenizer(), "full", "hf-run", every=4, callbacks=saving, max_epochs=1, val=Batches(RANK, WORLD))
    dist.barrier()
    trained = WithTokenizer.load_from_checkpoint(at("hf-run", 4), weights_only=False).model
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(again), logits(trained))
    assert not torch.equal(logits(again), logits(Hard().model))
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["dtype"] == "float32"
    assert "lm_head.weight" not in load_file(out / "model.safetensors")  # tied
    assert (out / "generation_config.json").exists()
    assert transformers.PreTrainedTokenizerFast.from_pretrained(out).get_vocab() == tokenizer().get_vocab()
    low = transformers.AutoModelForCausalLM.from_pretrained(half)
    assert low.dtype == torch.bfloat16 and len(list(half.glob("*.safetensors"))) > 1
    assert all(torch.equal(t, trained.state_dict()[n].bfloat16()) for n, t in low.state_dict().items())
    say("save_hf of a sharded module gives identical logits, and bf16 if asked")


@case
def export_from_disk() -> None:
    for kind in KINDS:
        fit(Hard(), kind, f"offline-{kind}", every=4, max_epochs=1)
        if RANK == 0:
            out = ROOT / f"offline-{kind}-hf"
            export_command.main([str(at(f"offline-{kind}", 4)), str(out)])
            trained = Hard.load_from_checkpoint(at(f"offline-{kind}", 4), weights_only=False).model
            assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(out)), logits(trained))
            export_command.main(
                [str(at(f"offline-{kind}", 4)), str(out), "--module", "resuming:Hard", "--dtype", "float16"]
            )
            assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.float16
        dist.barrier()
        say(f"export of a {kind} checkpoint without the module gives identical logits")


@case
def export_adapters() -> None:
    import peft

    for kind in KINDS:
        out = ROOT / f"adapters-{kind}-hf"
        fit(modules.Adapters(), kind, f"hf-adapters-{kind}", every=4, max_epochs=1, callbacks=[SaveAtEnd(out)])
        dist.barrier()
        trained = modules.Adapters.load_from_checkpoint(at(f"hf-adapters-{kind}", 4)).model
        assert sorted(p.name for p in out.iterdir() if p.suffix != ".md") == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        again = peft.PeftModel.from_pretrained(causal_lm("llama"), out)
        own, found = trained.state_dict(), again.state_dict()
        assert own.keys() == found.keys()
        assert all(torch.equal(own[n], found[n]) for n in own)
        assert all(float(own[n].norm()) > 0 for n in own if "lora_" in n)
        assert torch.equal(logits(again), logits(trained))
        if RANK == 0:
            offline = ROOT / f"adapters-{kind}-offline"
            export_command.main([str(at(f"hf-adapters-{kind}", 4)), str(offline)])
            one, two = (load_file(p / "adapter_model.safetensors") for p in (out, offline))
            assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
        dist.barrier()
        say(f"adapters exported from a {kind} run: every tensor is the trained one")


@case
def export_what_needs_a_choice() -> None:
    out = ROOT / "policy-hf"
    fit(modules.PolicyAndReference(), "full", "policy", every=4, max_epochs=1, callbacks=[SaveAtEnd(out)])
    dist.barrier()
    trained = modules.PolicyAndReference.load_from_checkpoint(at("policy", 4))
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(out)), logits(trained.policy))
    if RANK == 0:
        export_command.main([str(at("policy", 4)), str(ROOT / "reference-hf"), "--model", "reference"])
        again = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "reference-hf")
        assert torch.equal(logits(again), logits(trained.reference))
        with pytest.raises(CommandError, match="'policy', 'reference'"):
            export_command.main([str(at("policy", 4)), str(out), "--model", "other"])
    dist.barrier()
    with pytest.raises(ValueError, match="one of 'one', 'two'"):
        export.save_hf(modules.TwoOptimizers(), out)
    with pytest.raises(ValueError, match="no Hugging Face model"):
        export.save_hf(torch.nn.Linear(2, 2), out)
    say("the model that trains is exported, unless another is named")


@case
def export_experts() -> None:
    out = ROOT / "experts-hf"
    fit(modules.Experts(), "sharded", "experts", every=4, max_epochs=1, callbacks=[SaveAtEnd(out)])
    dist.barrier()
    trained = modules.Experts.load_from_checkpoint(at("experts", 4)).model
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(again), logits(trained))
    say("experts are written one by one, as from_pretrained expects them")
