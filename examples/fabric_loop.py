"""A training loop of one's own on Lightning Fabric. One line of it accelerates the model; `--plain` leaves that out.

On GPUs: python examples/fabric_loop.py --gpu --model CHECKPOINT
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric

from lightning_liger import accelerate
from loop_parts import batches, parser, parts


def main() -> None:
    args = parser(__doc__).parse_args()

    device = {"accelerator": "cuda", "devices": "auto", "precision": "bf16-mixed"}
    fabric = Fabric(**device if args.gpu else {"accelerator": "cpu", "devices": 1})
    fabric.launch()
    model, examples, collate = parts(args.data, args.model)
    handle = None if args.plain else accelerate(model)  # before setup(), which wraps it
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    loader = fabric.setup_dataloaders(batches(examples, collate, args.batch_size))
    for step, batch in zip(range(args.steps), loader, strict=False):
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step + 1} loss {loss.item():.6f}")
    if handle is not None:
        fabric.print(handle.report.render())
        handle.revert()


if __name__ == "__main__":
    main()
