"""Hugging Face's Trainer. One line before it accelerates the model; `--plain` leaves that out.

On GPUs: torchrun --nproc-per-node=2 examples/hf_trainer.py --gpu --model CHECKPOINT
"""

from __future__ import annotations

import tempfile
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_liger import accelerate
from loop_parts import parser, parts


class PrintLosses(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.6f}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--output", default=tempfile.gettempdir(), help="where the Trainer writes")
    args = options.parse_args()

    model, examples, collate = parts(args.data, args.model)
    handle = None if args.plain else accelerate(model)
    arguments = TrainingArguments(
        output_dir=args.output,
        use_cpu=not args.gpu,
        bf16=args.gpu,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=3e-4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model, arguments, collate, examples, callbacks=[PrintLosses()]).train()
    if handle is not None:
        print(handle.report.render())
        handle.revert()


if __name__ == "__main__":
    main()
