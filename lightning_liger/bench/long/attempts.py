"""The process that trains: one document, two optimizer steps, and what became of it."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger.bench.batches import contents, whole_numbers
from lightning_liger.bench.clock import Clock
from lightning_liger.bench.gsm8k import PRECISION, SHAPES, collate, module_class
from lightning_liger.bench.long.counted import CountedMemory
from lightning_liger.bench.long.rungs import Rung
from lightning_liger.bench.long.search import Attempt
from lightning_liger.bench.memory import PeakMemory
from lightning_liger.bench.work import Work, peak_flops
from lightning_liger.bench.worker import is_memory, quiet
from lightning_liger.trees import callback_bases

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
else:
    _Base = type("_Base", callback_bases(), {})

_STEPS = 2  # the first makes the optimizer's state, and pays for what is paid once


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        size: of :data:`~lightning_liger.bench.gsm8k.SHAPES`. memory: bytes that it may take; 0 for what there is.
        seed: of weights and tokens. accelerator: Lightning's.
    """

    size: str
    memory: int = 0
    seed: int = 0
    accelerator: str = "auto"

    @property
    def precision(self) -> str:
        return PRECISION[self.size]


@dataclass(frozen=True)
class Device:
    """Where it is trained; ``flops``: operations per second in its precision, or None."""

    name: str
    kind: str
    memory: int
    flops: float | None


def serve(pipe: Connection, subject: Subject) -> None:
    """Say which device there is, then try every ``(rung, tokens)`` that comes out of ``pipe``; None is the end."""
    os.dup2(2, 1)  # what modules print must not stand among results
    quiet()
    pipe.send(_device(subject))
    while (asked := pipe.recv()) is not None:
        rung, tokens = asked
        measured = _Measured(subject)
        try:
            try:
                _train(subject, rung, tokens, measured)
            finally:
                measured.end()
            answer = measured.attempt(tokens)
        except BaseException as error:
            answer = _failure(error, tokens)
        pipe.send(answer)
        del measured
        _clear()


def _device(subject: Subject) -> Device:
    if not torch.cuda.is_available() or subject.accelerator == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Device("CPU", "cpu", subject.memory or pages, None)
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    return Device(
        torch.cuda.get_device_name(device), "cuda", subject.memory or total, peak_flops(device, subject.precision)
    )


class _Measured(_Base):
    """Notes time, memory and loss of the steps."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self._device: torch.device | None = None
        self._counted: CountedMemory | None = None
        self._losses: list[Tensor] = []
        self._flops: float | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._device = device = trainer.strategy.root_device
        self._clock, self._memory = Clock(device), PeakMemory(device)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._work = Work(pl_module)
        if self._subject.memory and self._device is not None:
            self._bound(self._device, self._subject.memory)
        self._clock.begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batch = whole_numbers(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._clock.tick()
        self._losses.append(outputs["loss"].detach())

    def _bound(self, device: torch.device, memory: int) -> None:
        """Allocations beyond so many bytes fail, as they would where memory is used up.

        On a CPU what steps make is counted, the model is not.
        """
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(memory / total, 1.0), device)
            return
        self._counted = CountedMemory(memory)
        self._counted.__enter__()

    def end(self) -> None:
        """Whatever has become of the training."""
        if self._counted is not None:
            self._counted.__exit__(None, None, None)

    def attempt(self, tokens: int) -> Attempt:
        seconds = self._clock.seconds()
        flops = self._work.of([contents(self._batch)])
        return Attempt(
            tokens,
            True,
            seconds=seconds[-1],
            peak_memory=self._memory.read() if self._counted is None else self._counted.peak,
            loss=float(self._losses[0]),
            flops=flops,
        )


def _train(subject: Subject, rung: Rung, tokens: int, measured: _Measured) -> None:
    import lightning.pytorch

    from lightning_liger import LigerCallback, LigerFSDPStrategy

    lightning.pytorch.seed_everything(subject.seed, verbose=False)
    generator = torch.Generator().manual_seed(subject.seed)
    document = torch.randint(1, SHAPES[subject.size]["vocab_size"], (tokens,), generator=generator)
    # all but the first token are to be learnt: continued pretraining on one document
    data: Any = DataLoader([(document, 1)] * _STEPS, batch_size=1, collate_fn=collate)  # type: ignore[arg-type]
    callbacks: list[Any] = [] if rung.options is None else [LigerCallback(**rung.options)]
    kind: Any = lightning.pytorch.Trainer
    strategies: Any = LigerFSDPStrategy
    trainer = kind(
        accelerator=subject.accelerator,
        devices=1,
        precision=subject.precision,
        strategy="auto" if rung.strategy is None else strategies(**rung.strategy),
        callbacks=[*callbacks, measured],
        max_steps=_STEPS,
        max_epochs=-1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    quiet()  # once more: importing sets loggers back
    trainer.fit(module_class()(subject.size), data)


def _failure(error: BaseException, tokens: int) -> Attempt:
    import traceback

    text = " ".join(str(error).split())
    memory = is_memory(error)
    trace = "" if memory else "".join(traceback.format_exception(error))
    traceback.clear_frames(error.__traceback__)
    what = "out of memory" if memory else f"{type(error).__name__}: {text[:300]}"
    return Attempt(tokens, False, what, not memory, trace=trace)


def _clear() -> None:
    """Give back what the attempt held, so that the next one begins as the first did."""
    with suppress(Exception):
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
