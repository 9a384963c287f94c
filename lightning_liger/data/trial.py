"""Trial steps on the user's own module and samples: what a batch needs in memory, and nothing is trained."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_liger.data.planner import Ints, plan
from lightning_liger.data.randomness import random_numbers_untouched
from lightning_liger.data.untouched import module_untouched, nothing_logged
from lightning_liger.device_memory import free_bytes
from lightning_liger.head.pending import settle_pending
from lightning_liger.optim.adamw import fused_step_of
from lightning_liger.trees import is_deepspeed

# Of the memory that this process can have: the rest is for what libraries take beside PyTorch, later than the trials do.
_OURS = 0.95
# Of what is left of that for activations: they differ from batch to batch, and leave fragments. What weights, gradients
# and optimizer state take does neither.
_ACTIVATIONS = 0.85
_SAMPLED_BUDGETS = 64
_OPTION, _REMEDY = "max_tokens_per_batch='auto'", "Give a number of tokens, such as 16384."


class CudaMemory:
    """Bytes of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def available(self) -> int:
        """What this process holds, and what nobody does; not more than it may have."""
        torch.cuda.empty_cache()
        return free_bytes(self._device) + torch.cuda.memory_allocated(self._device)

    def begin(self) -> int:
        """Forget the last peak; what is held now."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)


def memory_of(device: torch.device) -> CudaMemory | None:
    """None where the device sets no limit that would be known beforehand."""
    return CudaMemory(device) if device.type == "cuda" else None


def why_not_tried(trainer: Any) -> str:
    """Why steps cannot be run without stepping an optimizer, or ``""``."""
    if not trainer.lightning_module.automatic_optimization:
        return "this module steps its optimizers by itself (automatic_optimization=False)"
    if is_deepspeed(trainer.strategy):
        return "DeepSpeed runs backward and steps in one"
    return ""


class Trials:
    """Runs forward and backward of batches, on every rank the same.

    Gradients are there from the beginning, as they are in training: Lightning clears those of the last step between
    forward and backward, and accumulated ones stay.

    Attributes:
        limit: bytes that a batch may need, beside weights, gradients, and the optimizer state that the first step will
            make; the least of all ranks.
        count: steps that were tried.
    """

    def __init__(self, trainer: Any, loader: DataLoader[Any], memory: CudaMemory) -> None:
        self._trainer = trainer
        self._loader = loader
        self._memory = memory
        self.count = 0
        self._available = memory.available()
        held = memory.begin() + _gradients(trainer) + _optimizer_state(trainer)
        self.limit = -self._most_of_ranks(-((self._available * _OURS - held) * _ACTIVATIONS))

    @classmethod
    def of(cls, trainer: Any, loader: DataLoader[Any]) -> Trials | None:
        """None where memory has no limit that is known.

        Raises:
            ValueError: a training whose steps cannot be tried.
        """
        memory = memory_of(trainer.strategy.root_device)
        if memory is None:
            return None
        if why := why_not_tried(trainer):
            raise ValueError(
                f"max_tokens_per_batch='auto' tries training steps without stepping, and {why}. Give a number of tokens, "
                "such as 16384."
            )
        return cls(trainer, loader, memory)

    def peak(self, batches: list[Ints]) -> float | None:
        """Bytes that forward and backward of the worst of these batches need, beside weights and gradients.

        Of the rank that needs most; None if it has not as many.

        Raises:
            ValueError: the step fails, or ranks cannot go on after one of them ran out of memory.
        """
        needed: float = 0.0
        try:
            for indices in batches:
                self.count += 1
                needed = max(needed, self._step(indices))
        except torch.OutOfMemoryError as error:
            if self._trainer.world_size > 1:
                raise ValueError(
                    "max_tokens_per_batch='auto': a trial batch did not fit into memory, and training cannot go on after "
                    "that on several ranks. Start from a smaller batch_size, or give a number of tokens."
                ) from error
            needed = float("inf")
        # what libraries have taken meanwhile is not there for batches
        needed = self._most_of_ranks(needed + max(0, self._available - self._memory.available()) * _ACTIVATIONS)
        return None if needed == float("inf") else needed

    def _step(self, indices: Ints) -> float:
        trainer, module = self._trainer, self._trainer.lightning_module
        strategy, dataset = trainer.strategy, self._loader.dataset
        with (
            random_numbers_untouched(strategy.root_device),
            module_untouched(module, _OPTION, _REMEDY),
            nothing_logged(module),
        ):
            batch = self._loader.collate_fn([dataset[int(i)] for i in indices])
            batch = trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = strategy.batch_to_device(batch, dataloader_idx=0)
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            held = self._memory.begin()
            arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)
            with torch.enable_grad():
                try:
                    output = strategy.training_step(*arguments.values())
                    loss = output if isinstance(output, torch.Tensor) else output["loss"]
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    raise ValueError(
                        "max_tokens_per_batch='auto' runs training_step before training starts, and it failed with "
                        f"{type(error).__name__}: {error}. Give a number of tokens, such as 16384."
                    ) from error
                strategy.pre_backward(loss)
                loss.backward()
                strategy.post_backward(loss)
            settle_pending()
            return float(self._memory.peak() - held)

    def _most_of_ranks(self, value: float) -> float:
        if not (dist.is_available() and dist.is_initialized()):
            return value
        most = torch.tensor(value, dtype=torch.float64, device=self._trainer.strategy.root_device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)


def worst_batches(lengths: Ints, budget: int) -> list[Ints]:
    """Samples of the fullest batch, and of the one with most padding, among some that would be made of these lengths."""
    some = np.random.default_rng(0).permutation(len(lengths))
    enough = int(np.searchsorted(lengths[some].cumsum(), _SAMPLED_BUDGETS * budget)) + 1
    # the longest sample decides what attention and padding need
    some = np.unique(np.append(some[:enough], lengths.argmax()))
    made = plan(lengths[some], budget, 1)
    batches = [some[made.batch(step, 0)] for step in range(made.steps)]
    fullest = max(batches, key=lambda b: int(lengths[b].sum()))
    widest = max(batches, key=lambda b: len(b) * int(lengths[b].max()))
    return [fullest] if fullest is widest else [fullest, widest]


def _gradients(trainer: Any) -> int:
    """Bytes of gradients that are not there yet."""
    missing = [(p, 1) for p in trainer.lightning_module.parameters() if p.requires_grad and p.grad is None]
    return _bytes(missing, trainer.strategy.root_device)


def _bytes(values: Sequence[tuple[torch.nn.Parameter, float]], device: torch.device) -> int:
    """Of so many tensors like each parameter, as far as they are on the device."""
    local = [(p.to_local() if isinstance(p, DTensor) else p, number) for p, number in values]
    return round(sum(number * p.numel() * p.element_size() for p, number in local if p.device.type == device.type))


def _optimizer_state(trainer: Any) -> int:
    """Bytes that optimizers will keep on the device from their first step on.

    Two values per parameter, as Adam has, or SGD's; Adam's as well where optimizers are not made yet.
    """
    wanted: list[tuple[torch.nn.Parameter, float]] = [
        (p, 2) for p in trainer.lightning_module.parameters() if p.requires_grad
    ]
    if trainer.optimizers:
        wanted = [(p, n) for optimizer in trainer.optimizers for p, n in _values_to_come(optimizer)]
    return _bytes(wanted, trainer.strategy.root_device)


def _values_to_come(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, float]]:
    fused = fused_step_of(optimizer)
    for group in optimizer.param_groups:
        values = int(bool(group["momentum"])) if isinstance(optimizer, torch.optim.SGD) else 2
        for p in group["params"]:
            if p.requires_grad and not optimizer.state.get(p):
                yield p, values if fused is None else fused.moment_bytes(p) / p.element_size()
