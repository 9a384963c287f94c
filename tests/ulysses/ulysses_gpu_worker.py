"""Two processes on two GPUs, run by ``torchrun``: bf16 steps on slices are as far from fp32 as those of one GPU are."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import sliced_steps as s
import torch
import torch.distributed as dist
import torch.nn as nn
import transformers
from helpers import leave, relative_all
from torch import Tensor

from lightning_liger.accelerate import accelerate
from lightning_liger.sequence import SequenceGroup
from lightning_liger.settings import Settings

LENGTHS = (3000, 17, 1200, 777)


def llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 5003}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**{**sizes, **heads, **changes})
    ).train()


def gemma2() -> Any:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 5003}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "sliding_window": 256}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.Gemma2Config(**sizes, **heads)).train()


class Preference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = llama(), llama().eval().requires_grad_(False)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(1, 5000, mask.shape, generator=generator) * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :10] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any, s.Batch], Any]]] = {
    "labels=": (llama, s.by_labels),
    "own loss": (llama, s.own_loss),
    "tied": (lambda: llama(tie_word_embeddings=True), s.own_loss),
    "one key and value head": (lambda: llama(num_key_value_heads=1), s.own_loss),
    "gemma2": (gemma2, s.own_loss),
    "preference": (Preference, s.preference),
    "readers": (llama, s.readers),
    "hidden states": (llama, s.hidden_states),
}


def step(
    make: Callable[[], Any], function: Any, dtype: torch.dtype, sequence: SequenceGroup | None, ours: bool = True
) -> tuple[float, dict[str, Tensor], Any]:
    module = make().to("cuda", dtype)
    accelerated = accelerate(module, Settings(), sequence) if ours else None
    host = batch()
    for _ in range(2):  # the second one finds everything chosen
        module.zero_grad()
        data = {k: v.to("cuda") for k, v in host.items()}
        if accelerated is not None:
            accelerated.book.pair(host, data)
        loss = function(module, data)
        loss.backward()
    found = {n: p.grad.float() for n, p in module.named_parameters() if p.grad is not None}
    for gradient in found.values() if sequence is not None else ():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return float(loss), found, accelerated


def check(name: str, sequence: SequenceGroup) -> str:
    make, function = CASES[name]
    expected = step(make, function, torch.float32, None, ours=False)
    alone = step(make, function, torch.bfloat16, None)
    divided = step(make, function, torch.bfloat16, sequence)
    assert divided[2].report.padding.packed_calls == divided[2].report.padding.calls, divided[2].report.padding
    errors = [(abs(r[0] - expected[0]) / abs(expected[0]), relative_all(r[1], expected[1])) for r in (alone, divided)]
    found = " ".join(f"loss {loss:.1e} gradient {gradient:.1e}" for loss, gradient in errors)
    backends = ", ".join(divided[2].report.padding.attention)
    assert errors[1][0] <= 2 * errors[0][0] + 2e-3 and errors[1][1] <= 1.5 * errors[0][1] + 1e-3, (name, found)
    reads = divided[2].book.device_reads
    return f"{name}: alone, divided: {found}; {backends}; {reads} device reads; off: {divided[2].report.padding.off}"


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.backends.cuda.matmul.allow_tf32 = False
    assert dist.group.WORLD is not None
    sequence = SequenceGroup.of(dist.group.WORLD)
    for name in names or CASES:
        said = check(name, sequence)
        if sequence.rank == 0:
            print(f"ok {said}", flush=True)
    if sequence.rank == 0:
        print(f"cases: {len(names or CASES)}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
