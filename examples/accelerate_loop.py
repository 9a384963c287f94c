"""A training loop of one's own on Hugging Face Accelerate. One line of it accelerates the model; `--plain` leaves that out.

On GPUs: accelerate launch examples/accelerate_loop.py --gpu --model CHECKPOINT
"""

from __future__ import annotations

import torch
from accelerate import Accelerator

from lightning_liger import accelerate
from loop_parts import batches, parser, parts


def main() -> None:
    args = parser(__doc__).parse_args()

    accelerator = Accelerator(cpu=not args.gpu, mixed_precision="bf16" if args.gpu else "no")
    model, examples, collate = parts(args.data, args.model)
    handle = None if args.plain else accelerate(model)  # before prepare(), which wraps it
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(examples, collate, args.batch_size))
    for step, batch in zip(range(args.steps), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step + 1} loss {loss.item():.6f}")
    if handle is not None:
        accelerator.print(handle.report.render())
        handle.revert()


if __name__ == "__main__":
    main()
