"""Train one module plain and accelerated, in two processes that take turns.

Separate processes give each variant its own peak memory and keep either from warming up the other.
Turns of a few steps let the noise of the machine fall on both alike.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from transformers.utils import logging as transformers_logging

from sft_data import DataError
from sft_module import SFTDataModule, SFTModule

VARIANTS = ("plain", "accelerated")
PAUSE = 0.3  # the worker threads of the variant that just ran spin for a while before they sleep


class VariantFailed(RuntimeError):
    pass


@dataclass(frozen=True)
class Settings:
    data: str
    model: str
    batch_size: int
    max_length: int
    max_steps: int
    steps_per_turn: int
    lr: float
    seed: int
    accelerator: str
    precision: str


@dataclass
class Turn:
    seconds: float
    tokens: int
    slots: int
    losses: list[float]
    checksums: list[int]


@dataclass
class Outcome:
    device: str = ""
    peak_memory: int = 0
    turns: list[Turn] = field(default_factory=list)

    @property
    def measured(self) -> list[Turn]:
        """The first turn pays for compilation, allocation and the callback's own checks."""
        return self.turns[1:]

    @property
    def losses(self) -> list[float]:
        return [loss for turn in self.turns for loss in turn.losses]

    @property
    def checksums(self) -> list[int]:
        return [checksum for turn in self.turns for checksum in turn.checksums]

    @property
    def tokens_per_second(self) -> float:
        return sum(turn.tokens for turn in self.measured) / sum(turn.seconds for turn in self.measured)

    @property
    def padding(self) -> float:
        return 1 - sum(turn.tokens for turn in self.turns) / sum(turn.slots for turn in self.turns)


class PeakMemory:
    """Peak of what training takes: allocated on the GPU, or resident above the process before `fit`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type == "cpu":
            # Where the system has no such file, the peak counts from the start of the process.
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
            self.before = self._status("VmRSS") or self._largest()

    @staticmethod
    def _status(key: str) -> int:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), 0)

    @staticmethod
    def _largest() -> int:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, (self._status("VmHWM") or self._largest()) - self.before)


class Baton(L.Callback):
    """Trains only while it is this process's turn, and reports each turn to the parent."""

    def __init__(self, pipe: Connection, settings: Settings) -> None:
        self.pipe = pipe
        self.settings = settings
        self.losses: list[Tensor] = []
        self.checksums: list[Tensor] = []
        self.tokens: list[Tensor] = []
        self.slots = 0

    def _wait(self) -> None:
        self.pipe.recv()
        self.started = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.pipe.send(str(pl_module.device))
        self._wait()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Only device-side sums here: reading a value would make the host wait for the device at each step.
        ids, mask = batch["input_ids"], batch["attention_mask"]
        self.losses.append(outputs["loss"].detach())
        self.tokens.append(mask.sum())
        self.checksums.append((ids.flatten() * torch.arange(1, ids.numel() + 1, device=ids.device)).sum())
        self.slots += mask.numel()
        if trainer.global_step % self.settings.steps_per_turn and trainer.global_step < self.settings.max_steps:
            return
        losses = [float(loss) for loss in self.losses]  # waits for the device, once a turn
        seconds = time.perf_counter() - self.started
        tokens = sum(int(count) for count in self.tokens)
        self.pipe.send(Turn(seconds, tokens, self.slots, losses, [int(checksum) for checksum in self.checksums]))
        self.losses, self.checksums, self.tokens, self.slots = [], [], [], 0
        if trainer.global_step < self.settings.max_steps:
            self._wait()


def quiet() -> None:
    """Lightning's tips and advice would drown the few lines that this program is about."""
    warnings.filterwarnings("ignore", module=r"(lightning|pytorch_lightning|lightning_fabric|torch)\b.*")
    # The stand-alone packages share one hook for messages with `lightning`: whichever came last writes them.
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()


def _callbacks(variant: str) -> list[L.Callback]:
    if variant == "plain":
        return []
    from lightning_liger import LigerCallback

    return [LigerCallback()]


def _train(variant: str, settings: Settings, pipe: Connection) -> None:
    try:
        callbacks = _callbacks(variant)
        quiet()  # after the callbacks: importing sets the loggers back
        L.seed_everything(settings.seed, verbose=False)
        module = SFTModule(settings.model, lr=settings.lr)
        data = SFTDataModule(
            settings.data, settings.model, settings.batch_size, settings.max_length, seed=settings.seed
        )
        trainer = L.Trainer(
            callbacks=[Baton(pipe, settings), *callbacks],
            accelerator=settings.accelerator,
            devices=1,
            precision=settings.precision,  # type: ignore[arg-type]
            max_steps=settings.max_steps,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        memory = PeakMemory(trainer.strategy.root_device)
        trainer.fit(module, data)
        pipe.send(memory.read())
    except (DataError, MisconfigurationException, OSError) as error:
        # The user can mend these, and would look for how among the lines of a traceback.
        pipe.send(VariantFailed(str(error)))
    except BaseException:
        pipe.send(VariantFailed(f"the {variant} run failed:\n{traceback.format_exc()}"))


def _receive(pipe: Connection, variant: str) -> Any:
    try:
        message = pipe.recv()
    except EOFError:
        raise VariantFailed(f"the {variant} run ended without a word; was it killed for its memory?") from None
    if isinstance(message, VariantFailed):
        raise message
    return message


@contextmanager
def _processes(settings: Settings) -> Iterator[dict[str, Connection]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    try:
        for variant in VARIANTS:
            pipes[variant], theirs = context.Pipe()
            process = context.Process(target=_train, args=(variant, settings, theirs), name=variant, daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            processes.append(process)
        yield pipes
        for process in processes:
            process.join(timeout=60)
    finally:
        for process in processes:
            process.terminate()


def train_side_by_side(settings: Settings, on_turns: Callable[[dict[str, Outcome]], None]) -> dict[str, Outcome]:
    outcomes = {variant: Outcome() for variant in VARIANTS}
    with _processes(settings) as pipes:
        for variant, pipe in pipes.items():
            outcomes[variant].device = _receive(pipe, variant)
        for _ in range(0, settings.max_steps, settings.steps_per_turn):
            for variant, pipe in pipes.items():
                time.sleep(PAUSE)
                pipe.send("go")
                outcomes[variant].turns.append(_receive(pipe, variant))
            on_turns(outcomes)
        for variant, pipe in pipes.items():
            outcomes[variant].peak_memory = _receive(pipe, variant)
    return outcomes
