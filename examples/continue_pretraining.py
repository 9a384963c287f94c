"""Continued pre-training on a stream: an IterableDataset that nobody can index, and batches filled by tokens.

The module and the data know nothing of the callback; the Trainer's line does.
"""

from __future__ import annotations

import sys

import lightning as L

from lightning_liger import LigerCallback
from recipe import Stopwatch, options, parser, prepare, show_gain
from sft_module import SFTModule
from streaming_data import StreamingDataModule


def main(argv: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument(
        "--max-tokens-per-batch",
        type=int,
        metavar="N",
        help="fill batches by tokens; the plain run then has other batches, and is not compared",
    )
    args = prepare(made.parse_args(argv))
    if args.max_tokens_per_batch is not None:
        args.compare = False

    def make() -> tuple[SFTModule, StreamingDataModule]:
        sizes = {"batch_size": args.batch_size, "max_length": args.max_length, "workers": 4 if args.gpu else 0}
        return SFTModule(args.model, args.lr), StreamingDataModule(args.data, args.model, seed=args.seed, **sizes)

    module, data = make()
    callback, watch = LigerCallback(max_tokens_per_batch=args.max_tokens_per_batch), Stopwatch()
    trainer = L.Trainer(callbacks=[callback, watch], strategy=args.strategy, **options(args))
    trainer.fit(module, data)
    return show_gain(args, callback, watch, make)


if __name__ == "__main__":
    sys.exit(main())
