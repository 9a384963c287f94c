"""liger_fsdp where it runs, DeepSpeed's ZeRO where it does not or where it is asked for. The callback is the same.

The module and the data know nothing of the callback; the Trainer's line does.
"""

from __future__ import annotations

import importlib.util
import sys

import lightning as L
import torch

from lightning_liger import LigerCallback
from recipe import Stopwatch, options, parser, prepare, show_gain
from sft_module import SFTDataModule, SFTModule


def why_not_fsdp2() -> str:
    """Why FSDP2 cannot run here, or "" if it can."""
    if importlib.util.find_spec("torch.distributed.fsdp") is None or not torch.distributed.is_available():
        return "this build of torch has no torch.distributed"
    from torch.distributed import fsdp

    if not hasattr(fsdp, "fully_shard"):
        return f"torch {torch.__version__} has no fully_shard; 2.11 is the oldest that liger_fsdp runs on"
    if torch.backends.mps.is_available():
        return "FSDP2 does not run on Apple GPUs"
    return ""


def why_not_deepspeed() -> str:
    """Why Lightning's DeepSpeed strategy cannot run here, or "" if it can."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install 'lightning-liger[deepspeed]')"
    return "" if torch.cuda.is_available() else "DeepSpeed under Lightning needs a CUDA device"


def choose(deepspeed_stage: int | None) -> tuple[str, str]:
    """A strategy, and why it was taken.

    Raises:
        SystemExit: DeepSpeed was asked for and cannot run.
    """
    missing = why_not_deepspeed()
    if deepspeed_stage is not None:
        if missing:
            raise SystemExit(f"--deepspeed {deepspeed_stage}: {missing}")
        return f"deepspeed_stage_{deepspeed_stage}", "asked for"
    reason = why_not_fsdp2()
    if not reason:
        return "liger_fsdp", "FSDP2 runs here"
    if missing:
        return "auto", f"{reason}, and {missing}"
    return "deepspeed_stage_2", reason


def main(argv: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--deepspeed", type=int, choices=(1, 2, 3), metavar="STAGE", help="take DeepSpeed in any case")
    args = made.parse_args(argv)
    strategy, reason = choose(args.deepspeed)
    print(f"strategy={strategy!r}: {reason}")
    args.compare = False  # the plain training has other precision and other collectives
    args = prepare(args)

    def make() -> tuple[SFTModule, SFTDataModule]:
        data = SFTDataModule(args.data, args.model, args.batch_size, args.max_length, args.seed)
        return SFTModule(args.model, args.lr), data

    module, data = make()
    callback, watch = LigerCallback(), Stopwatch()
    trainer = L.Trainer(callbacks=[callback, watch], strategy=strategy, **options(args))
    trainer.fit(module, data)
    return show_gain(args, callback, watch, make)


if __name__ == "__main__":
    sys.exit(main())
