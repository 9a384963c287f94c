"""Two processes of which one raises in its second step, and stays alive: the other must stop, and say why."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning as L
import modules
from runs import ACCELERATOR, QUIET, RANK, WORLD

from lightning_liger.parallel import failures


class Failing(modules.InInit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and RANK == 1:
            raise ValueError("the data of rank 1 is broken")
        return super().training_step(batch, batch_idx)


def main() -> None:
    failures._PATIENCE = failures._GRACE = 2.0
    trainer = L.Trainer(accelerator=ACCELERATOR, devices=WORLD, strategy="liger_fsdp", **QUIET)
    began = time.monotonic()
    try:
        trainer.fit(Failing(), modules.loader(RANK, WORLD))
    except BaseException as error:
        print(f"rank {RANK} raised {type(error).__name__}: {error}".replace("\n", " "), flush=True)
    if RANK == 1:
        time.sleep(float(sys.argv[1]))  # a process that does not end does not close its connections either
    print(f"rank {RANK} is done after {time.monotonic() - began:.0f} s", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
