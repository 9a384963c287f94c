"""Long documents on several GPUs: the longest that trains, and what a step of one length is made of, for each ``k``.

    python tests/bench/sequence_step.py --gpus 2 --size 0.5b --k 1 2 --longest 32k
    python tests/bench/sequence_step.py --gpus 2 --size 7b --k 1 2 --document 32k

Each batch is one document, of which the first tenth is a prompt. Models have the shapes of Qwen2.5 and random weights,
fp32 master weights and AdamW state, bf16 compute, blocks recomputed in backward (``--checkpointing``). With ``k = 1``
each rank has a document of its own; with ``k`` that many ranks share one.

``--longest START`` trains on longer and longer documents, a quarter of an octave each time, in one launch that ends when memory does.
``--document TOKENS`` trains on that length and looks into one step with ``torch.profiler``.

Tokens/s are of one GPU. MFU is over ``--peak``: ``6 N`` a token, N without the input embedding, and beside it with what
attention costs, ``6 · layers · heads · head size · T`` a token for a causal document of T tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from qwen_training import RANK, SHAPES, WORLD, Clock, Finetune, parameters, wait
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerFSDPStrategy

_GROWTH = 2**0.25
_OF_NCCL = {
    "SendRecv": "all-to-all",
    "AllGather": "all-gather",
    "ReduceScatter": "reduce-scatter",
    "AllReduce": "all-reduce",
}


def document(tokens: int, vocabulary: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary, (1, tokens), generator=generator)
    labels = ids.clone()
    labels[:, : tokens // 10] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


class Steps(L.Callback):
    """Says after the last step of each length how it was; looks into the one after it where it is asked to."""

    def __init__(self, args: argparse.Namespace, k: int, lengths: list[int]) -> None:
        self.args, self.k, self.lengths = args, k, lengths
        self.clock = Clock()
        self.profiler: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.args.steps == 0 and torch.cuda.is_available():
            wait()
            torch.cuda.reset_peak_memory_stats()
        if batch_idx == len(self.lengths) - 1 and self.args.document:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.profiler = torch.profiler.profile(activities=kinds)
            self.profiler.__enter__()
        self.clock.on_train_batch_start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.on_train_batch_end()
        if self.profiler is not None:
            self.profiler.__exit__(None, None, None)
            self._say_shares()
        elif (batch_idx + 1) % self.args.steps == 0 and RANK == 0:
            self._say(self.lengths[batch_idx], float(pl_module.losses[-1]))

    def _say(self, tokens: int, loss: float) -> None:
        args, shape = self.args, SHAPES[self.args.size]
        seconds = statistics.median(self.clock.seconds[-args.steps + 1 :])
        rate = tokens / self.k / seconds
        layers, width = shape["num_hidden_layers"], shape["hidden_size"]
        plain = 6 * parameters(args.size)
        shares = [rate * flops / args.peak / 1e12 for flops in (plain, plain + 6 * layers * width * tokens)]
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        reserved = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
        print(
            f"RESULT {args.size} k={self.k} document {tokens:>9,}  peak {memory:6.1f} GiB ({reserved:.1f} reserved)  "
            f"{seconds:7.2f} s  {rate:>8,.0f} tok/s/GPU  MFU {shares[0]:.1%}, with attention {shares[1]:.1%}  loss {loss:.4f}",
            flush=True,
        )

    def _say_shares(self) -> None:
        if RANK:
            return
        busy: Counter[str] = Counter()
        for event in self.profiler.key_averages():
            time_us = getattr(event, "self_device_time_total", 0.0)
            if time_us and str(getattr(event, "device_type", "")).endswith("CUDA"):
                name = event.key.lower()
                kind = next((v for k, v in _OF_NCCL.items() if "nccl" in name and k.lower() in name), None)
                kind = kind or ("attention" if "flash" in name or "fmha" in name else "the rest")
                busy[kind] += time_us
        step = self.clock.seconds[-1] * 1e6
        shares = ", ".join(f"{name} {value / step:.1%}" for name, value in busy.most_common())
        print(f"SHARES of a step of {step / 1e6:.2f} s (kernels overlap): {shares}", flush=True)


def train(args: argparse.Namespace) -> None:
    (k,) = args.k
    if args.document:
        lengths = [args.document] * (args.steps + 1)
    else:
        grown = [round(args.longest * _GROWTH**i / 1024) * 1024 or args.longest for i in range(args.most)]
        lengths = [n for n in grown for _ in range(args.steps)]
    vocabulary, on_gpu = SHAPES[args.size]["vocab_size"], torch.cuda.is_available()
    data = [document(n, vocabulary, 1000 * (RANK // k) + i) for i, n in enumerate(lengths)]
    callback = LigerCallback(verbose=RANK == 0, verify="off")
    trainer = L.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=WORLD,
        strategy=LigerFSDPStrategy(sequence_parallel_size=k, activation_checkpointing=args.checkpointing),
        precision="bf16-mixed",
        max_steps=len(lengths),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[callback, Steps(args, k, lengths)],
    )
    module = Finetune(args.size, "cuda" if on_gpu else "cpu", torch.float32)
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]


def launch(args: argparse.Namespace, k: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}", __file__]
    command += ["--inside", "--size", args.size, "--k", k, "--steps", args.steps, "--peak", args.peak]
    command += ["--checkpointing", args.checkpointing, "--most", args.most]
    command += ["--document", args.document] if args.document else ["--longest", args.longest]
    began = time.perf_counter()
    worker = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = worker.communicate(timeout=args.limit)
    except subprocess.TimeoutExpired:
        worker.terminate()  # torchrun ends its workers
        said, _ = worker.communicate()
        print(f"more than {args.limit:.0f} s")
    lines = said.splitlines()
    results = [line for line in lines if line.startswith(("RESULT", "SHARES"))]
    print("\n".join(results))
    if args.verbose or not results:
        print("\n".join(lines[-40:]))
    memory = next((line for line in lines if "OutOfMemoryError" in line), "")
    print(f"k={k}: {time.perf_counter() - began:.0f} s in all, exit {worker.returncode} {memory[:160]}", flush=True)


def tokens(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="ranks of each launch; CPUs where there is no GPU")
    parser.add_argument("--size", default="0.5b", choices=SHAPES)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2], help="ranks that share a document")
    parser.add_argument("--document", type=tokens, default=0, help="train on this length, such as 32k")
    parser.add_argument("--longest", type=tokens, default=tokens("32k"), help="where the search begins")
    parser.add_argument("--most", type=int, default=24, help="lengths that are tried at most")
    parser.add_argument("--steps", type=int, default=3, help="of each length; the first is not timed")
    parser.add_argument("--checkpointing", default="full", choices=("none", "selective", "full"))
    parser.add_argument("--peak", type=float, default=989.0, help="dense bf16 TFLOP/s of one GPU")
    parser.add_argument("--limit", type=float, default=280.0, help="seconds for one launch")
    parser.add_argument("--verbose", action="store_true", help="the last lines of each launch")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.inside:
        for k in args.k:
            launch(args, k)
        return
    warnings.filterwarnings("ignore")
    train(args)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads need not survive the end of the interpreter


if __name__ == "__main__":
    main()
