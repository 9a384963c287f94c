"""LightningModules as people write them, none of which knows that it will be sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import PAD, VOCAB, causal_lm
from own_modules import IsTheModel as IsTheModel
from own_modules import sgd
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

LABELS = 4  # of every document, so that a mean over tokens is the same as a mean over rows


def rows(count: int = 16, seed: int = 2) -> list[Tensor]:
    """Documents of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(LABELS + 1, 20, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]


def collate(batch: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.full((len(batch), max(map(len, batch))), PAD)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(batch):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
        labels[i, len(row) - LABELS : len(row)] = row[-LABELS:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loader(rank: int = 0, ranks: int = 1, per_step: int = 4, count: int = 16) -> DataLoader[Any]:
    """Every ``per_step`` rows in order are one step, whatever the number of ranks."""
    data: Any = rows(count)
    sampler: Any = DistributedSampler(data, ranks, rank, shuffle=False)
    return DataLoader(data, batch_size=per_step // ranks, collate_fn=collate, sampler=sampler)


class _Labels:
    """Passes ``labels=``."""

    model: Any

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())  # type: ignore[attr-defined]


class InInit(_Labels, L.LightningModule):
    def __init__(self, kind: str = "qwen2") -> None:
        super().__init__()
        self.model = causal_lm(kind)


class InInitPL(_Labels, pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = causal_lm("llama")


class InConfigureModel(_Labels, L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("cpu"):  # strategies differ in the device they make it on, and devices in their numbers
                self.model = causal_lm("llama")


class InSetup(_Labels, L.LightningModule):
    def setup(self, stage: str) -> None:
        if not hasattr(self, "model"):
            self.model = causal_lm("gpt2")

    def configure_optimizers(self) -> Any:
        return sgd(self.trainer.model.parameters())


class OwnSharding(InInit):
    """As Lightning's documentation of ModelParallelStrategy shows it; the embedding and head are left to others."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.device_mesh is None or self.device_mesh["data_parallel"].size() == 1:
            return
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class OwnLoss(InInit):
    """Cross entropy from logits, through ``self(...)``."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask).logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["input_ids"], batch["attention_mask"])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        return {"loss": loss, "logits": logits.detach()}


class Metrics(OwnLoss):
    """Accuracy and perplexity from logits, in training and validation, before and after the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["input_ids"], batch["attention_mask"])[:, :-1]
        labels = batch["labels"][:, 1:]
        counted = labels != -100
        accuracy = (logits.argmax(-1) == labels)[counted].float().mean()
        top = logits.softmax(-1).max(-1).values
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.log_dict({"accuracy": accuracy, "top": (top * counted).sum() / counted.sum()}, sync_dist=True)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Norms(InInit):
    """Logs norms of gradients and weights with Lightning's own helper."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("weights", sum(p.detach().square().sum() for p in self.parameters()).sqrt())
        self.log("gradient", self.model.model.layers[0].self_attn.q_proj.weight.grad.norm())


class Adapters(_Labels, L.LightningModule):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        base = causal_lm("llama").to(dtype)
        torch.manual_seed(3)
        self.model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0))

    def configure_optimizers(self) -> Any:
        return sgd(p for p in self.parameters() if p.requires_grad)


class Thawed(InInit):
    """Blocks are frozen until the third batch."""

    def __init__(self) -> None:
        super().__init__("llama")
        self.model.model.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.model.model.requires_grad_(True)


class Manual(InInit):
    """One optimizer, stepped by hand, clipped by hand, every second batch."""

    def __init__(self, kind: str = "qwen2") -> None:
        super().__init__(kind)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.model(**batch).loss
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach()}


class PolicyAndReference(L.LightningModule):
    """A preference-like loss over log-probabilities of a policy and of a frozen reference."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = causal_lm("qwen2", seed=1)
        self.reference = causal_lm("qwen2", seed=5).eval().requires_grad_(False)

    def logps(self, model: Any, batch: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"][:, 1:]
        found = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (found * (labels >= 0)).sum(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            reference = self.logps(self.reference, batch)
        return -F.logsigmoid(0.3 * (self.logps(self.policy, batch) - reference)).mean()

    def configure_optimizers(self) -> Any:
        return sgd(self.policy.parameters())


class OnTheModule(InInit):
    """Parameters on the LightningModule itself, one of them without dimensions, one that freezes the embedding."""

    def __init__(self) -> None:
        super().__init__("llama")
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.model.get_input_embeddings().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        logits = logits / self.temperature
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        return loss * self.scale.sum() + self.scale.square().sum()


class TwoOptimizers(L.LightningModule):
    """Two models trained against each other, each with an optimizer that is toggled, and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one = causal_lm("qwen2", seed=1)
        self.two = causal_lm("gpt2", seed=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        total = 0.0
        for sign, optimizer in zip((1.0, -1.0), optimizers, strict=True):
            self.toggle_optimizer(optimizer)
            loss = self.one(**batch).loss + sign * 0.1 * self.two(**batch).loss
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            total += loss.detach()
        for scheduler in schedulers:
            scheduler.step()
        return {"loss": total}

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (self.one, self.two)]
        steps = self.trainer.estimated_stepping_batches
        return optimizers, [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=steps) for o in optimizers]


class ManualOnTheModule(OnTheModule):
    """Reads its own parameters after each of two optimizer steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss.detach() * self.scale.detach().float().sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Experts(_Labels, L.LightningModule):
    """A mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = MixtralConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=4,
                pad_token_id=PAD,
            )
            self.model = MixtralForCausalLM(config).train()


Make = Callable[[], Any]
