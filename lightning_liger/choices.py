"""What options may be. Types, so that command lines list the values, and refuse others by the option's place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Auto = Literal["auto"]
Attention = Literal["auto", "fa4", "fa3", "fa2", "varlen", "flex", "sdpa"]
HeadBackend = Literal["auto", "torch", "triton", "liger"]
Overlong = Literal["error", "truncate", "skip", "own_batch"]
LossNormalization = Literal["batch", "tokens"]
Verify = Literal["off", "warn", "strict"]
Budget = Literal["auto", "keep_samples"]
CompileChoice = bool | Literal["auto", "cudagraphs"]
TiledChoice = bool | int | Auto
KernelChoice = bool | Auto | Mapping[str, bool | Auto]

ActivationCheckpointing = Literal["none", "selective", "full"]
OptimizerStateDtype = Literal["bf16"]
