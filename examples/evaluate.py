"""Fine-tune, ask the held-out questions right away, and hand the exported checkpoint to an evaluation harness.

The module and the data know nothing of the callback; the Trainer's line does. Without --data: is a name of the standard
library a class, a method, a property or a function? With GSM8K's train.jsonl, the number behind "####" is compared.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import lightning as L

from held_out import AnsweringModule, HeldOutDataModule, kind_pairs
from lightning_liger import LigerCallback
from recipe import Stopwatch, options, parser, prepare, show_gain


def export(trainer: L.Trainer, module: AnsweringModule, data: HeldOutDataModule, directory: Path) -> None:
    """Write what ``from_pretrained`` loads; on several ranks, all of them call this."""
    if hasattr(trainer.strategy, "save_hf"):
        trainer.strategy.save_hf(directory)
    else:
        module.model.save_pretrained(directory)
    if trainer.is_global_zero:
        data.tokenizer.save_pretrained(directory)


def harness(directory: Path, tasks: str, limit: int) -> list[str] | None:
    """The command of the harness that is installed."""
    if importlib.util.find_spec("lm_eval") is not None:
        given = ["--model", "hf", "--model_args", f"pretrained={directory}", "--tasks", tasks, "--limit", str(limit)]
        return [sys.executable, "-m", "lm_eval", *given]
    if importlib.util.find_spec("evalscope") is not None:
        return ["evalscope", "eval", "--model", str(directory), "--datasets", tasks, "--limit", str(limit)]
    return None


def main(argv: list[str] | None = None) -> int:
    made = parser(__doc__, max_steps=150, batch_size=16, max_length=128, lr=1e-3)
    made.add_argument("--limit", type=int, default=128, help="held-out questions (default: %(default)s)")
    made.add_argument("--tasks", help="tasks for lm-evaluation-harness or EvalScope, such as gsm8k")
    made.set_defaults(layers=2, hidden_size=128, vocab_size=2048, compare=False)
    args = made.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.data is None:
        args.data = str(args.output / "kinds.jsonl")
        lines = (json.dumps(pair) + "\n" for pair in kind_pairs())
        Path(args.data).write_text("".join(lines), encoding="utf-8")
    args = prepare(args)

    def make() -> tuple[AnsweringModule, HeldOutDataModule]:
        sizes = {"batch_size": args.batch_size, "max_length": args.max_length, "limit": args.limit}
        module = AnsweringModule(args.model, args.lr, max_new_tokens=256 if args.gpu else 8)
        return module, HeldOutDataModule(args.data, args.model, seed=args.seed, **sizes)

    module, data = make()
    callback, watch = LigerCallback(), Stopwatch()
    trainer = L.Trainer(callbacks=[callback, watch], strategy=args.strategy, num_sanity_val_steps=0, **options(args))
    trainer.fit(module, data)
    code = show_gain(args, callback, watch, make)  # before validation begins a report of its own
    (metrics,) = trainer.validate(module, data, verbose=False)
    expected = Counter(answer for _, answer in module.answered)
    guess = expected.most_common(1)[0][1] / expected.total()
    print(f"\nexact match {metrics['exact_match']:.0%} of {expected.total()} held-out questions; guessing: {guess:.0%}")
    directory = args.output / "exported"
    export(trainer, module, data, directory)
    print(f"exported to {directory}")
    if args.tasks is not None and trainer.is_global_zero:
        command = harness(directory, args.tasks, args.limit)
        if command is None:
            print("--tasks needs a harness: pip install 'lm-eval[hf]', or pip install evalscope")
            return 1
        return subprocess.run(command, check=False).returncode or code
    return code


if __name__ == "__main__":
    sys.exit(main())
