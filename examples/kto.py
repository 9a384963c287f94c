"""Kahneman-Tversky optimisation: single answers, each with a thumb up or down.

The module and the data know nothing of the callback; the Trainer's line does.
"""

from __future__ import annotations

import sys

import lightning as L

from kto_module import KTOModule
from lightning_liger import LigerCallback
from preference_data import PreferenceDataModule
from recipe import Stopwatch, options, parser, prepare, show_gain


def main(argv: list[str] | None = None) -> int:
    args = prepare(parser(__doc__, batch_size=4).parse_args(argv))

    def make() -> tuple[KTOModule, PreferenceDataModule]:
        sizes = {"batch_size": args.batch_size, "max_length": args.max_length}
        return KTOModule(args.model, lr=args.lr), PreferenceDataModule(
            args.data, args.model, unpaired=True, seed=args.seed, **sizes
        )

    module, data = make()
    callback, watch = LigerCallback(), Stopwatch()
    trainer = L.Trainer(callbacks=[callback, watch], strategy=args.strategy, **options(args))
    trainer.fit(module, data)
    return show_gain(args, callback, watch, make)


if __name__ == "__main__":
    sys.exit(main())
