"""Two processes, run by ``torchrun``: a sharded head, plain and accelerated, in several layouts and with several losses.

Over gloo on CPUs, or over NCCL on two GPUs with ``TEST_ACCELERATOR=gpu``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from helpers import causal_lm, collate, documents, leave
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from lightning_liger import accelerate

ON_GPU = os.environ.get("TEST_ACCELERATOR") == "gpu"
DEVICE = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if ON_GPU else "cpu")
RANK = int(os.environ["RANK"])
Batch = dict[str, Tensor]


def batch(step: int) -> Batch:
    """Another one on each rank and in each step."""
    start = 6 * step + 3 * RANK
    return {k: v.to(DEVICE) for k, v in collate(documents(24, seed=2)[start : start + 3]).items()}


def logits_of(model: Any, b: Batch) -> Tensor:
    found: Tensor = model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits[:, :-1]
    return found


# -- layouts ---------------------------------------------------------------------------------------------------------

Layout = Callable[[nn.Module], nn.Module]


def decoder_of(model: Any) -> Any:
    return next(m for m in model.modules() if hasattr(m, "layers"))


def sharded(model: nn.Module, head: str = "alone", **options: Any) -> nn.Module:
    """Blocks one by one, the head as ``head`` says, then the whole."""
    decoder: Any = decoder_of(model)
    lm_head = next(m for n, m in model.named_modules() if n.endswith("lm_head"))
    policy = {k: v for k, v in options.items() if k == "mp_policy"}
    for layer in decoder.layers:
        fully_shard(layer, **policy)
    if head == "alone":
        fully_shard(lm_head, **options)
    elif head == "with the norm":
        fully_shard([decoder.norm, lm_head], **options)
    return fully_shard(model, **(options if head == "root" else policy))


def flattened(model: Any, *, original: bool) -> nn.Module:
    """FSDP1, under which the head stands aside."""
    blocks = ModuleWrapPolicy({type(decoder_of(model).layers[0])})
    return FullyShardedDataParallel(model, use_orig_params=original, device_id=DEVICE, auto_wrap_policy=blocks)


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[DEVICE.index] if ON_GPU else None)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
LAYOUTS: dict[str, Layout] = {
    "alone": sharded,
    "alone, kept": partial(sharded, reshard_after_forward=False),
    "with the norm": partial(sharded, head="with the norm"),
    "root, given back": partial(sharded, head="root", reshard_after_forward=True),
    "root": partial(sharded, head="root"),
}
LOW: dict[str, Layout] = {
    "alone, bf16": partial(sharded, mp_policy=BF16),
    "root, bf16, given back": partial(sharded, head="root", mp_policy=BF16, reshard_after_forward=True),
}


# -- losses ----------------------------------------------------------------------------------------------------------


def by_labels(model: Any, b: Batch, step: int) -> Tensor:
    loss: Tensor = model(**b).loss
    return loss


def own_loss(model: Any, b: Batch, step: int) -> Tensor:
    """And on one rank no label counts."""
    labels = b["labels"][:, 1:] if RANK == 0 or step else torch.full_like(b["labels"][:, 1:], -100)
    x = logits_of(model, b)
    loss = F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="sum") / 20
    with torch.no_grad():
        float(((x.argmax(-1) == labels) & (labels != -100)).float().mean())
    return loss


def logps(x: Tensor, b: Batch) -> Tensor:
    picked = x.log_softmax(-1).gather(-1, b["input_ids"][:, 1:, None])[..., 0]
    return (picked * (b["labels"][:, 1:] != -100)).sum(-1)


def preference(model: Any, b: Batch, step: int) -> Tensor:
    """Two forward passes before one backward, one without gradients between them, an entropy bonus."""
    first = logits_of(model, b)
    with torch.no_grad():
        reference = logps(logits_of(model, b), b)
    flipped = {k: v.flip(0) for k, v in b.items()}
    second = logits_of(model, flipped)
    logp = first.log_softmax(-1)
    mask = b["labels"][:, 1:] != -100
    bonus = ((logp.exp() * logp).sum(-1) * mask).sum() / 100
    return -F.logsigmoid(0.1 * (logps(first, b) - reference - 0.9 * logps(second, flipped))).mean() + bonus


class Penalty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad / ctx.saved_tensors[0].numel()


def computed_in_full(model: Any, b: Batch, step: int) -> Tensor:
    x = model(input_ids=b["input_ids"], attention_mask=torch.ones_like(b["input_ids"])).logits
    penalty: Tensor = Penalty.apply(x)
    return penalty + x.cumsum(-1).tanh().mean() + x[..., 3:9].logsumexp(-1).mean()


LOSSES = [by_labels, own_loss, preference, computed_in_full]


def train(
    layout: Layout, make: Callable[[], nn.Module], loss: Callable[..., Tensor], ours: bool, early: bool
) -> tuple[list[Tensor], ...]:
    """Losses, gradients and parameters of two optimizer steps of two micro-batches, with an evaluation in between whose logits only one rank keeps."""
    model: Any = make().to(DEVICE)
    handle = accelerate(model) if ours and early else None
    model = layout(model)
    handle = accelerate(model) if ours and not early else handle
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.2)
    values, gradients, kept = [], [], []
    for step in range(2):
        for micro in range(2):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == 1)
            b = batch(2 * step + micro)
            value = loss(model, b, step)
            value.backward()
            values.append(value.detach())
        gradients += [whole(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            x = logits_of(model.eval(), b)
            values.append(F.cross_entropy(x.flatten(0, 1), b["labels"][:, 1:].flatten()))
            if RANK == 0:
                kept.append(x)
        model.train()
    x = logits_of(model, b)
    F.cross_entropy(x.flatten(0, 1), b["labels"][:, 1:].flatten()).backward()
    # after the backward has given the weights back
    values.append((x.detach().logsumexp(-1) * b["attention_mask"][:, :-1]).sum())
    del kept
    parameters = [whole(p).detach() for p in model.parameters()]
    if handle is not None:
        flat = isinstance(model, FullyShardedDataParallel)
        assert any("FSDP1" in reason for reason in handle.report.head.off) == flat
        assert (handle.report.head.fused_calls > 0) != flat
        handle.revert()
        assert not any("lightning_liger" in str(h) for m in model.modules() for h in m._forward_pre_hooks.values())
    return values, gradients, parameters


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
    return found


def adapted(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = peft.get_peft_model(causal_lm("llama"), peft.LoraConfig(r=4, lora_alpha=8, **options))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return model


def only_the_head() -> nn.Module:
    model = causal_lm("llama").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


def cases() -> Iterator[tuple[str, Layout, Callable[[], nn.Module], Callable[..., Tensor], float]]:
    for name, layout in LAYOUTS.items():
        for loss in LOSSES:
            yield f"{name}, {loss.__name__}", layout, partial(causal_lm, "llama"), loss, 1e-5
    yield "alone, accelerated first", sharded, partial(causal_lm, "llama"), preference, 1e-5
    tied = partial(sharded, head="root", reshard_after_forward=True)
    yield "tied, preference", tied, partial(causal_lm, "qwen2"), preference, 1e-5
    yield "tied, own_loss", tied, partial(causal_lm, "qwen2"), own_loss, 1e-5
    yield "only the head is trained", sharded, only_the_head, preference, 1e-5
    yield "the head is frozen", sharded, frozen_head, preference, 1e-5
    for name, layout in LOW.items():
        yield f"{name}, own_loss", layout, partial(causal_lm, "llama"), own_loss, 2e-2
    saved = partial(adapted, target_modules=["q_proj"], modules_to_save=["lm_head"])
    lora = partial(adapted, target_modules=["lm_head", "q_proj"])
    for original in (False, True):
        flat = partial(flattened, original=original)
        yield f"FSDP1, use_orig_params={original}", flat, partial(causal_lm, "llama"), own_loss, 1e-5
    for name, layout in {"alone": sharded, "root": tied, "ddp": replicated}.items():
        yield f"head saved by an adapter, {name}", layout, saved, own_loss, 1e-5
        yield f"adapter on the head, {name}", layout, lora, preference, 1e-5


def frozen_head() -> nn.Module:
    model = causal_lm("llama")
    model.lm_head.requires_grad_(False)
    return model


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Relative to the whole: single tensors among them may be zero up to rounding."""
    assert len(found) == len(expected)
    return max(float((a - b).norm()) for a, b in zip(found, expected, strict=True)) / max(
        float(b.norm()) for b in expected
    )


def main() -> None:
    torch.set_num_threads(1)
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if ON_GPU else "gloo", timeout=timedelta(seconds=40))
    wanted = os.environ.get("TEST_CASES", "")
    for name, layout, make, loss, tolerance in (c for c in cases() if wanted in c[0]):
        began = time.perf_counter()
        plain, mine = (train(layout, make, loss, ours, "accelerated first" in name) for ours in (False, True))
        worst = max(distance(a, b) for a, b in zip(mine, plain, strict=True))
        assert worst <= tolerance, f"{name}: {worst:.1e}"
        if RANK == 0:
            print(f"{name}: {worst:.1e} ({time.perf_counter() - began:.1f} s)", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
