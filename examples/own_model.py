"""A GPT written from nothing in plain PyTorch: no transformers model, no attention mask, a loss by hand.

The module and the data know nothing of the callback; the Trainer's line does.
"""

from __future__ import annotations

import sys

import lightning as L

from gpt_module import GPTModule
from lightning_liger import LigerCallback
from recipe import Stopwatch, options, parser, prepare, show_gain
from sft_module import SFTDataModule


def main(argv: list[str] | None = None) -> int:
    args = prepare(parser(__doc__).parse_args(argv))
    width, layers = (768, 12) if args.gpu else (args.hidden_size, args.layers)

    def make() -> tuple[GPTModule, SFTDataModule]:
        module = GPTModule(args.model, width, layers, width // 64, args.max_length, args.lr)
        return module, SFTDataModule(args.data, args.model, args.batch_size, args.max_length, args.seed)

    module, data = make()
    callback, watch = LigerCallback(), Stopwatch()
    trainer = L.Trainer(callbacks=[callback, watch], strategy=args.strategy, **options(args))
    trainer.fit(module, data)
    return show_gain(args, callback, watch, make)


if __name__ == "__main__":
    sys.exit(main())
