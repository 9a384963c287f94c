"""Steps of a full fine-tune on several GPUs: ``strategy="liger_fsdp"`` beside Lightning's own ``FSDPStrategy``.

    torchrun --nproc-per-node=2 tests/bench/fsdp_step.py --size 7b
    torchrun --nproc-per-node=2 tests/bench/fsdp_step.py --size 14b --variants liger-16k

Models are randomly initialised from the real configurations of Qwen2.5. Sequences have lengths like GSM8K's with its
prompts ignored; fp32 master weights and AdamW state everywhere, bf16 compute. Tokens are real ones, without padding.
MFU is ``6 N tokens/s`` over ``--peak``, N without the input embedding.
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerFSDPStrategy

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "14b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Module(L.LightningModule):
    """An ordinary module: it passes labels and takes the loss."""

    def __init__(self, size: str, device: str, full_checkpointing: bool) -> None:
        super().__init__()
        self.size, self.device_kind, self.full_checkpointing = size, device, full_checkpointing
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        from transformers import AutoModelForCausalLM, Qwen2Config

        torch.manual_seed(0)
        config = Qwen2Config(**SIZES[self.size], max_position_embeddings=32768, rope_theta=1e6, use_cache=False)
        with torch.device(self.device_kind):  # billions of random numbers take minutes on a CPU
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if self.full_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Clock(L.Callback):
    """Wall time of each step, the device waited for at its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        _wait()
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        _wait()
        self.seconds.append(time.perf_counter() - self._start)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def batches(vocabulary: int, steps: int, sequences: int, tokens: int) -> list[dict[str, Tensor]]:
    """Padded batches of ``sequences`` rows, or of as many as fill ``tokens``; other ones on each rank."""
    generator = torch.Generator().manual_seed(100 + RANK)
    made = []
    for _ in range(steps):
        lengths = torch.empty(4096).log_normal_(5.2, 0.4, generator=generator).long().clamp(40, 700)
        count = int((lengths.cumsum(0) <= tokens).sum()) if tokens else sequences
        lengths = lengths[:count]
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.randint(1, vocabulary, mask.shape, generator=generator) * mask
        labels = ids.masked_fill(mask == 0, -100)
        prompts = (lengths * 0.45).long()
        labels[torch.arange(mask.shape[1]) < prompts[:, None]] = -100
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def run(args: argparse.Namespace, name: str, strategy: Any, callbacks: list[Any], tokens: int) -> None:
    on_gpu = torch.cuda.is_available()
    clock = Clock()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    module = Module(args.size, "cuda" if on_gpu else "cpu", args.checkpointing == "full")
    data = batches(SIZES[args.size]["vocab_size"], args.steps, args.sequences, tokens)
    trainer = L.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=WORLD,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[*callbacks, clock],
    )
    began = time.perf_counter()
    error = ""
    try:
        trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    except torch.cuda.OutOfMemoryError:
        error = "out of memory"
    if not error:
        report(args, name, data, clock, module, time.perf_counter() - began)
    elif RANK == 0:
        print(f"{args.size:>4} {name:<14} {error}", flush=True)
    for parameter in module.parameters():
        parameter.grad = None
    trainer.strategy.optimizers = []
    del module, trainer
    gc.collect()


def report(args: argparse.Namespace, name: str, data: Any, clock: Clock, module: Module, whole: float) -> None:
    device = module.losses[0].device
    real = torch.tensor([float(b["attention_mask"].sum()) for b in data], device=device)
    if dist.is_initialized():
        dist.all_reduce(real)
    per_gpu = (real / WORLD).tolist()
    rates = [n / s for n, s in zip(per_gpu, clock.seconds, strict=True)][args.warmup :]
    shape = SIZES[args.size]
    # parameters that FSDP1 flattens or FSDP2 shards still know their global shape by name only: count from the shapes
    h, f, layers, v = (shape[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    kv = h // shape["num_attention_heads"] * shape["num_key_value_heads"]
    parameters = layers * (2 * h * h + 2 * h * kv + h + 2 * kv + 3 * h * f + 2 * h) + h + v * h
    rate = statistics.median(rates)
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    padded = sum(b["input_ids"].numel() for b in data) / len(data)
    if RANK == 0:
        print(
            f"{args.size:>4} {name:<14} {rate:>9,.0f} tok/s/GPU {6 * parameters * rate / args.peak / 1e12:>6.1%} MFU "
            f"{1000 * statistics.median(clock.seconds[args.warmup :]):>8.0f} ms {peak:>6.1f} GB  "
            f"loss {float(module.losses[0]):.4f} {float(module.losses[-1]):.4f}  "
            f"{sum(per_gpu) / len(per_gpu):,.0f} tokens of {padded:,.0f} positions  {whole:.0f} s in all",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b", choices=SIZES)
    parser.add_argument("--sequences", type=int, default=8, help="rows of each batch in the variants that end in -8")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--peak", type=float, default=989.0, help="dense bf16 TFLOP/s of one GPU")
    parser.add_argument(
        "--checkpointing", default="none", choices=["none", "full"], help="the model's own, all variants"
    )
    parser.add_argument("--options", default="{}", help="options of LigerFSDPStrategy, as a Python dict")
    parser.add_argument("--variants", nargs="+", default=["stock-8", "liger-8", "liger-16k"])
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    options: dict[str, Any] = ast.literal_eval(args.options)

    def stock() -> Any:
        from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

        return FSDPStrategy(auto_wrap_policy={Qwen2DecoderLayer}, use_orig_params=True)

    def ours() -> Any:
        return LigerFSDPStrategy(**options)

    made: dict[str, tuple[Callable[[], Any], int, list[Any]]] = {
        "stock-8": (stock, 0, []),
        "stock-16k": (stock, 16384, []),
        "liger-8": (ours, 0, [LigerCallback()]),
        "liger-16k": (ours, 16384, [LigerCallback()]),
    }
    for name in args.variants:
        strategy, tokens, callbacks = made[name]
        run(args, name, strategy(), callbacks, tokens)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
