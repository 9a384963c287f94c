"""A training loop of one's own on Lightning Fabric. One line of it accelerates the model; `--plain` leaves that out.

On GPUs: python examples/fabric_loop.py --accelerator cuda --devices 2 --precision bf16-mixed --model CHECKPOINT
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric

from lightning_liger import accelerate
from loop_parts import batches, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="train without the plugin")
    parser.add_argument("--data", help="JSON lines (default: the standard library's docstrings)")
    parser.add_argument("--model", help="checkpoint directory (default: a small random Qwen2)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    args = parser.parse_args()

    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, precision=args.precision)
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
