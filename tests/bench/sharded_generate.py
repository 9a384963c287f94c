"""``generate()`` on a model that ``liger_fsdp`` shards: gathered for an evaluation loop, for each call, and in lock step.

    torchrun --nproc-per-node=2 tests/bench/sharded_generate.py --size 0.5b
    torchrun --nproc-per-node=2 tests/bench/sharded_generate.py --size 7b --tokens 64

Every rank decodes greedily, rank 1 twice as far as rank 0; the tokens must be those of the unsharded model. Printed are
tokens per second of all ranks together and the peak of allocated memory.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_liger import LigerFSDPStrategy
from lightning_liger.parallel.gathering import Gathering

_COMMON = {"vocab_size": 151936, "num_key_value_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4},
}
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class Module(L.LightningModule):
    def __init__(self, size: str, tokens: int, wanted: list[int] | None) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, Qwen2Config

        torch.manual_seed(0)
        # a random model's logits are close to each other: wider weights tell tokens apart in bf16, too
        config = Qwen2Config(**{**_COMMON, **SIZES[size]}, initializer_range=0.1, tie_word_embeddings=False)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.tokens = tokens * (1 + RANK)
        self.wanted = wanted
        self.rate = 0.0

    def generate(self) -> list[int]:
        prompt = torch.arange(100, 132, device=self.device)[None] + 50 * RANK
        made = self.model.generate(prompt, do_sample=False, max_new_tokens=self.tokens, eos_token_id=None)
        return made[0].tolist()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        begin = time.perf_counter()
        made = self.generate()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if batch_idx:  # the first is for warming up
            total = torch.tensor(self.tokens / (time.perf_counter() - begin), device=self.device)
            dist.all_reduce(total)
            self.rate = float(total)
        if self.wanted is not None:
            same = sum(a == b for a, b in zip(made, self.wanted, strict=True))
            assert same == len(made), f"rank {RANK}: {same} of {len(made)} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
    alone = Module(options.size, options.tokens, None).to(device)
    with torch.no_grad():
        wanted = alone.generate()
    del alone
    for name, gather, fits in (("whole loop", "auto", True), ("each call", False, True), ("lock step", False, False)):
        module = Module(options.size, options.tokens, wanted)
        strategy: Any = LigerFSDPStrategy(gather_in_evaluation=gather)
        trainer = L.Trainer(
            accelerator="gpu" if cuda else "cpu",
            devices=WORLD,
            precision="bf16-true",
            strategy=strategy,
            limit_val_batches=2,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        if not fits:
            Gathering.fits = lambda self: False  # type: ignore[method-assign]
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.validate(module, DataLoader(range(2)), verbose=False)  # type: ignore[arg-type]
        if RANK == 0:
            peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
            print(f"{name:<12} {module.rate:10.1f} tokens/s {peak:8.2f} GiB", flush=True)
        del module, trainer, strategy
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
