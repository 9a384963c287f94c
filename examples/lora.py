"""LoRA with PEFT: adapters on every linear layer, merged into an ordinary checkpoint at the end.

The module and the data know nothing of the callback; the Trainer's line does.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning as L

from lightning_liger import LigerCallback
from lora_module import LoRAModule
from recipe import Stopwatch, options, parser, prepare, show_gain
from sft_module import SFTDataModule


def main(argv: list[str] | None = None) -> int:
    made = parser(__doc__, lr=2e-4)
    made.add_argument("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    args = prepare(made.parse_args(argv))

    def make() -> tuple[LoRAModule, SFTDataModule]:
        module = LoRAModule(args.model, rank=args.rank, alpha=2 * args.rank, lr=args.lr)
        return module, SFTDataModule(args.data, args.model, args.batch_size, args.max_length, args.seed)

    module, data = make()
    callback, watch = LigerCallback(), Stopwatch()
    trainer = L.Trainer(callbacks=[callback, watch], strategy=args.strategy, **options(args))
    trainer.fit(module, data)
    code = show_gain(args, callback, watch, make)
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "save_hf"):
        module.save_adapter(args.output / "adapter")
        module.model.merge_and_unload().save_pretrained(args.output / "merged")
        data.tokenizer.save_pretrained(args.output / "merged")
        print(f"Adapter: {args.output / 'adapter'}   merged model: {args.output / 'merged'}")
    else:
        strategy.save_hf(args.output / "adapter")  # on every rank
        trainer.print(f"Adapter: {args.output / 'adapter'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
