"""What the demo measures: the ordinary module and data of ``sft_module.py``, made anew for every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sft_module import SFTDataModule, SFTModule


@dataclass(frozen=True)
class DemoJob:
    """Calling it builds the job; picklable, because other processes call it."""

    data: str
    model: str
    batch_size: int
    max_length: int
    lr: float
    seed: int
    accelerator: str
    precision: str

    def __call__(self) -> tuple[SFTModule, SFTDataModule, dict[str, Any]]:
        module = SFTModule(self.model, lr=self.lr)
        data = SFTDataModule(self.data, self.model, self.batch_size, self.max_length, seed=self.seed)
        return module, data, {"accelerator": self.accelerator, "precision": self.precision}
