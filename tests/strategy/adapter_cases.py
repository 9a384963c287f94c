"""Adapters of several kinds on a sharded base: they train as on one process, and every shard of them is exported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import peft
import torch
import torch.distributed as dist
import transformers
from case_tools import ROOT, case, fit, plain, same, say
from export_cases import SaveAtEnd, logits
from helpers import causal_lm
from modules import _Labels


class Adapted(_Labels, L.LightningModule):
    def __init__(self, base: Callable[[], Any], options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = peft.get_peft_model(base(), peft.LoraConfig(r=4, **options)).train()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), 1e-2, eps=1e-3)


def four_bit(**options: Any) -> Any:
    """On every rank, as QLoRA's tutorials do it: quantised while the file is read."""
    where = ROOT / "base"
    dist.barrier()
    causal_lm("llama").save_pretrained(where)
    dist.barrier()
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(where, quantization_config=config, device_map="cpu")


def four_bit_in_floats() -> Any:
    """Stored in a floating-point type, as FSDP1 wanted it."""
    return four_bit(bnb_4bit_quant_storage=torch.float32)


def llama() -> Any:
    return causal_lm("llama")


def tied() -> Any:
    return causal_lm("qwen2")


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "dora": (llama, {"target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"], "use_dora": True}),
    "saved": (tied, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "tokens": (tied, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4, 5]}),
    "qlora": (four_bit, {"target_modules": "all-linear"}),
    "qlora in floats": (four_bit_in_floats, {"target_modules": "all-linear"}),
}


@case
def kinds_of_adapters() -> None:
    for name, (base, options) in KINDS.items():
        if "qlora" in name and importlib.util.find_spec("bitsandbytes") is None:
            say("qlora: bitsandbytes is not installed")
            continue
        out: Path = ROOT / f"kind-{name.replace(' ', '-')}"
        expected = plain(Adapted(base, options), max_epochs=1)
        module = Adapted(base, options)
        found = fit(module, "sharded", callbacks=[SaveAtEnd(out)], max_epochs=1)
        dist.barrier()
        again = peft.PeftModel.from_pretrained(base(), str(out))
        for run in (
            expected,
            found,
        ):  # bytes of quantised weights, read as floats, may equal nothing, not even themselves
            run.parameters = {n: t for n, t in run.parameters.items() if "default" in n}
        trained = found.parameters
        own = {f"model.{n}": t for n, t in again.state_dict().items()}
        assert trained and all(torch.equal(own[n], t) for n, t in trained.items()), name
        if "qlora" not in name:  # whose evaluation on a CPU packs weights in blocks that are wider than this model
            assert not torch.equal(logits(again), logits(Adapted(base, options).model))
        say(f"{name}: {same(found, expected)}; exported tensor by tensor")
