"""Two processes, run by ``torchrun``: DeepSpeed's ZeRO stages 2 and 3 on CPUs over gloo, plain and accelerated."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import itertools
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from helpers import causal_lm, collate, documents
from torch import Tensor

from lightning_liger import accelerate

RANK = int(os.environ["RANK"])
ACCUMULATED = 2


def batch(step: int) -> dict[str, Tensor]:
    """Another one on each rank and in each step."""
    start = 6 * step + 3 * RANK
    return collate(documents(24, seed=2)[start : start + 3])


def logits_of(model: Any, b: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits[:, :-1]
    return found


def by_labels(engine: Any, b: dict[str, Tensor]) -> Tensor:
    loss: Tensor = engine(**b).loss
    return loss


def own_loss(engine: Any, b: dict[str, Tensor]) -> Tensor:
    """Outside of the engine's forward, and a metric of the same logits."""
    labels, x = b["labels"][:, 1:], logits_of(engine, b)
    loss = F.cross_entropy(x.flatten(0, 1), labels.flatten())
    with torch.no_grad():
        float(((x.argmax(-1) == labels) & (labels != -100)).float().mean())
    return loss


def preference(engine: Any, b: dict[str, Tensor]) -> Tensor:
    """Readers that need the weight in backward, and a call without gradients before."""

    def logps(x: Tensor) -> Tensor:
        picked = x.log_softmax(-1).gather(-1, b["input_ids"][:, 1:, None])[..., 0]
        return (picked * (b["labels"][:, 1:] != -100)).sum(-1)

    with torch.no_grad():
        reference = logps(logits_of(engine, b))
    x = logits_of(engine, b)
    entropy = ((x.softmax(-1) * x.log_softmax(-1)).sum(-1) * (b["labels"][:, 1:] != -100)).sum()
    return -F.logsigmoid(0.1 * (1.1 * logps(x) - reference)).mean() + 0.01 * entropy


def computed_in_full(engine: Any, b: dict[str, Tensor]) -> Tensor:
    x = engine(input_ids=b["input_ids"], attention_mask=torch.ones_like(b["input_ids"])).logits
    return x.cumsum(-1).tanh().mean()


LOSSES: list[Callable[..., Tensor]] = [by_labels, own_loss, preference, computed_in_full]


def train(stage: int, kind: str, loss: Callable[..., Tensor], ours: bool, early: bool, direct: bool) -> list[Tensor]:
    """Losses of two optimizer steps with accumulation, an evaluation after each whose logits one rank keeps; weights."""
    model = causal_lm(kind)
    handle = accelerate(model) if ours and early else None
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": ACCUMULATED,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    # gradients that are zero but for rounding, such as those of a key's bias, are divided by their own size otherwise
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    handle = accelerate(model) if ours and not early else handle
    values, kept = [], []
    for step in range(2 * ACCUMULATED):
        value = loss(engine, batch(step))
        value.backward() if direct else engine.backward(value)
        values.append(value.detach().clone())
        engine.step()
        if step % ACCUMULATED:
            engine.eval()
            with torch.no_grad():
                x, labels = logits_of(engine, batch(step)), batch(step)["labels"][:, 1:]
                values.append(F.cross_entropy(x.flatten(0, 1), labels.flatten()))
                if RANK == 0:
                    kept.append(x)
            engine.train()
    # one more read after the weights were given back
    x = logits_of(engine, batch(0))
    F.cross_entropy(x.flatten(0, 1), batch(0)["labels"][:, 1:].flatten()).backward()
    values.append((x.detach().logsumexp(-1) * batch(0)["attention_mask"][:, :-1]).sum())
    del x, kept
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        values += [p.detach().clone() for p in model.parameters()]
    if handle is not None:
        assert handle.report.head.fused_calls > 0, handle.report.head.off
        assert loss is computed_in_full or not handle.report.head.materialised_by, handle.report.head.materialised_by
        assert handle.report.to_dict()["padding_free"]["packed_calls"] > 0
        handle.revert()
        left = [f for m in model.modules() for f in vars(m).values() if "lightning_liger" in type(f).__module__]
        assert not left, left
    engine.destroy()
    return values


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    cases = [
        (stage, kind, loss, early, False)
        for stage, (kind, loss, early) in itertools.product(
            (3, 2), [(k, one, k == "qwen2") for k in ("llama", "qwen2") for one in LOSSES]
        )
    ]
    cases += [(stage, "llama", own_loss, True, True) for stage in (3, 2)]
    wanted = os.environ.get("TEST_CASES", "")
    failed = []
    for stage, kind, loss, early, direct in cases:
        name = f"stage {stage}, {kind}, {loss.__name__}" + (", own backward" if direct else "")
        if wanted not in name:
            continue
        plain, mine = (train(stage, kind, loss, ours, early, direct) for ours in (False, True))
        worst = max(float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in zip(mine, plain, strict=True))
        if worst > 1e-5:
            failed.append(name)
        if RANK == 0:
            print(f"{name}: {worst:.1e}", flush=True)
    assert not failed, failed


if __name__ == "__main__":
    main()
