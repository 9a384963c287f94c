"""What every peer is given: the same weights, the same samples in the same order, the same optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_liger.bench.messages import Plan
from lightning_liger.bench.task import Sample, Task
from lightning_liger.bench.turns import Turns
from lightning_liger.bench.work import Work


class Session:
    """One run of a peer.

    Attributes:
        task: what is trained.
        turns: whom to tell of batches, losses and steps.
        device: to train on.
        precision: Lightning's name of it.
        dtype: of the weights.
        autocast: to bf16 while computing.
        steps: optimizer steps, at most.
    """

    def __init__(self, task: Task, plan: Plan, turns: Turns) -> None:
        self.task = task
        self.turns = turns
        cuda = torch.cuda.is_available() and plan.trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda")
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.precision = str(plan.trainer.get("precision") or task.precision)
        if self.precision not in ("32-true", "bf16-mixed", "bf16-true"):
            raise ValueError(f"peers are measured in 32-true, bf16-mixed and bf16-true, not in {self.precision}.")
        self.dtype = torch.bfloat16 if self.precision == "bf16-true" else torch.float32
        self.autocast = self.precision == "bf16-mixed"
        self.steps = plan.most_steps
        self._seed = plan.seed
        turns.set_up(self.device)

    def model(self) -> Any:
        """``Qwen2ForCausalLM`` with the weights that the plain run begins with."""
        from lightning.pytorch import seed_everything

        seed_everything(self._seed, verbose=False)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                return self.task.model()
        finally:
            torch.set_default_dtype(before)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The plain run's."""
        return torch.optim.AdamW(model.parameters(), lr=self.task.learning_rate, fused=self.device.type == "cuda")

    def batches(self) -> list[list[Sample]]:
        """One for each step, and two that loaders fetch ahead."""
        return self.task.batches(self.steps + 2)

    def samples(self, tokens: int) -> list[Sample]:
        """In order, so many that they fill every step with ``tokens``, and two more."""
        found: list[Sample] = []
        have, batches = 0, 16
        while have < tokens * (self.steps + 2):
            batches *= 2
            found = [sample for batch in self.task.batches(batches) for sample in batch]
            have = sum(len(ids) for ids, _ in found)
        return found

    def start(self) -> None:
        """Everything is built; returns when the first turn begins."""
        with torch.device("meta"):
            model = self.task.model()
        self.turns.built()
        self.turns.start(Work(model), self.precision)

    def saw(self, samples: list[Sample]) -> None:
        """These are the batch of the next step."""
        self.turns.saw(lambda: self.task.collate(samples))


def labels(sample: Sample) -> Tensor:
    """Not shifted; ``-100`` where the prompt is."""
    ids, prompt = sample
    found = ids.clone()
    found[:prompt] = -100
    return found
