"""What the meter costs the host, per step, without a GPU: the time inside of its hooks, and inside of Lightning's logging.

    python tests/bench/meter_host_time.py [--steps 1000] [--every 10 50] [--profile]

A step of the model is tiny, so that nothing but the time in the hooks matters; that does not depend on the model's size.
Lightning's logging is summed as well (``on_batch_end`` and ``update_train_step_metrics``), with the meter and without
it: metrics that live in the Trainer's results are looked at in every step.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import pstats
import tempfile
import time
import warnings
from collections import Counter
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback
from lightning_liger.meter.meter import Meter

HOOKS = ("begin_batch", "before_backward", "after_backward", "before_optimizer_step", "end_batch")
LOGGING = ("on_batch_end", "update_train_step_metrics")
WARM_UP = 50  # steps


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=128,
            pad_token_id=0,
            use_cache=False,
        )
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Clocks(L.Callback):
    """Sums the time inside of the meter's hooks and of Lightning's logging, after the first steps."""

    def __init__(self, ours: LigerCallback, meter: bool, profile: cProfile.Profile | None) -> None:
        self.ours, self.with_meter, self.profile = ours, meter, profile
        self.seconds: Counter[str] = Counter()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        (meter,) = (h for h in self.ours._hooks if isinstance(h, Meter))
        if not self.with_meter:
            self.ours._hooks = [h for h in self.ours._hooks if h is not meter]
        for owner, names in ((meter, HOOKS), (trainer._logger_connector, LOGGING)):
            for name in names:
                setattr(owner, name, self._timed(name, getattr(owner, name), self.profile if owner is meter else None))

    def _timed(self, name: str, hook: Any, profile: cProfile.Profile | None) -> Any:
        def timed(*args: Any) -> None:
            if profile is not None:
                profile.enable()
            began = time.thread_time()
            hook(*args)
            self.seconds[name] += time.thread_time() - began
            if profile is not None:
                profile.disable()

        return timed

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == WARM_UP:  # what happens once: the model is read, a step watched, a peak measured
            self.seconds.clear()


def train(steps: int, every: int, meter: bool, profile: cProfile.Profile | None = None) -> Counter[str]:
    torch.manual_seed(0)
    lengths = torch.randint(4, 17, (steps, 16))
    data = []
    for row in lengths:
        mask = (torch.arange(16) < row[:, None]).long()
        ids = torch.randint(1, 128, mask.shape) * mask
        data.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    ours = LigerCallback(verbose=False, verify="off")
    clocks = Clocks(ours, meter, profile)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=steps,
            log_every_n_steps=every,
            logger=CSVLogger(folder, flush_logs_every_n_steps=10 * steps),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clocks, ours],
        )
        trainer.fit(Tiny(), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    # less what it costs to look at the clock
    nothing, runs = Clocks(ours, meter, None), 10_000
    hook = nothing._timed("nothing", lambda *args: None, None)
    for _ in range(runs):
        hook(None)
    clock = nothing.seconds["nothing"] / runs
    return Counter({name: seconds / (steps - WARM_UP) - clock for name, seconds in clocks.seconds.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--profile", action="store_true", help="cProfile of the hooks, by their own time")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for every in args.every:
        profile = cProfile.Profile() if args.profile else None
        seen, without = train(args.steps, every, True, profile), train(args.steps, every, False)
        hooks, logging_on, logging_off = (
            1e6 * sum(times[name] for name in names)
            for times, names in ((seen, HOOKS), (seen, LOGGING), (without, LOGGING))
        )
        print(
            f"log_every_n_steps={every}: {hooks:.0f} us per step in the meter's hooks; Lightning's logging takes "
            f"{logging_on:.0f} us with the meter, {logging_off:.0f} us without; both: {hooks + logging_on - logging_off:.0f} us"
        )
        print("  " + ", ".join(f"{name} {1e6 * seen[name]:.0f}" for name in HOOKS))
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
