"""Training steps by how decoder blocks run: as they are, on kernels, compiled, recorded as CUDA graphs.

    python tests/bench/blocks_step.py --cases 0.5b:4096 0.5b:16384 7b:4096 7b:16384 [--profile compiled]

Qwen2.5 shapes, random weights in bf16, one packed batch of documents of 64 to 512 tokens in which half of the tokens
are prompt, AdamW with a learning rate of 0 (so that every variant computes the same), gradients clipped. Printed are
median milliseconds of a step, those in which Python was busy, the peak of memory, and what shows that the arithmetic is
that of the first variant: loss and how far the gradient of four weights is from it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from qwen_training import qwen, wait
from torch import Tensor

from lightning_liger import Settings, accelerate
from lightning_liger.compilation.apply import compiled, recorded, stack_of
from lightning_liger.compilation.block import Graphs

VARIANTS = ("native", "kernels", "compiled", "native+graphs", "kernels+graphs", "compiled+graphs")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model(size: str) -> Any:
    return qwen(size, DEVICE, torch.bfloat16)


def batch(tokens: int, vocabulary: int, seed: int) -> dict[str, Tensor]:
    """Rows that hold ``tokens`` tokens, the longest 512, as many rows for every seed."""
    generator = torch.Generator().manual_seed(seed)
    count = max(2, tokens // 192)
    weights = torch.rand(count - 1, generator=generator) + 0.5
    rest = tokens - min(512, tokens // 2)
    lengths = (weights / weights.sum() * rest).long().clamp(1, 512)
    lengths[-1] += rest - lengths.sum()
    lengths = torch.cat([torch.tensor([tokens - rest]), lengths])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(1, vocabulary, mask.shape, generator=generator) * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[torch.arange(mask.shape[1]) < (lengths // 2)[:, None]] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@contextmanager
def variant(module: Any, name: str) -> Iterator[Any]:
    """``module`` accelerated in this way."""
    accelerated = accelerate(module, Settings(kernels=name.startswith("kernels")))
    backbone = module.base_model
    blocks = stack_of(backbone)
    switch, made = accelerated._switch, []

    def say(text: str) -> None:
        print("   ", text, flush=True)

    if name.startswith("compiled"):
        made += compiled(blocks, backbone, switch, Graphs("inductor", say))
        for binding in made:
            binding.bind()
    if name.endswith("graphs"):
        made += (found := recorded(blocks, switch, 4, say))
        for binding in found:
            binding.bind()
    try:
        yield accelerated
    finally:
        for binding in reversed(made):
            binding.unbind()
        accelerated.revert()


def run(module: Any, optimizer: Any, name: str, batches: list[Any], steps: int, warm: int, profile: bool) -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times, busy, first = [], [], 0.0
    with variant(module, name) as accelerated:
        parameters = list(module.parameters())

        def step(i: int) -> tuple[Tensor, list[Tensor]]:
            cpu = batches[i % len(batches)]
            moved = {k: v.to(DEVICE, non_blocking=True) for k, v in cpu.items()}
            accelerated.book.pair(cpu, moved)
            loss = module(**moved).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            layers = module.model.layers
            watched = [layers[0].self_attn.q_proj, layers[0].mlp.down_proj, layers[-1].mlp.up_proj, module.lm_head]
            kept = [m.weight.grad for m in watched] if i == 0 else []
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach(), kept

        for i in range(-warm, steps):
            wait()
            begin = time.perf_counter()
            loss, kept = step(i)
            cpu = time.perf_counter() - begin
            wait()
            took = time.perf_counter() - begin
            if i == -warm:
                first = took
            if i == 0:
                found = (float(loss), [g.float().cpu() for g in kept])
            if i > 0:
                times.append(1e3 * took)
                busy.append(1e3 * cpu)
        known = _FIRST.setdefault(id(batches), found)
        off = [float((a - b).norm() / b.norm()) for a, b in zip(found[1], known[1], strict=True)]
        peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0
        tokens = int(batches[0]["attention_mask"].sum())
        ms = statistics.median(times)
        embedding = 0 if module.config.tie_word_embeddings else module.model.embed_tokens.weight.numel()
        n = sum(p.numel() for p in parameters) - embedding
        print(
            f"  {name:<16} {ms:>8.1f} ms  python {statistics.median(busy):>7.1f}  {tokens / ms * 1e3:>9,.0f} tokens/s  "
            f"MFU {6 * n * tokens / ms / 989e9:>6.1%}  peak {peak:>6.1f} GB  first {first:>5.1f} s  "
            f"loss {found[0]:.5f}  gradients off {' '.join(f'{x:.1e}' for x in off)}",
            flush=True,
        )
        for reason in accelerated.report.padding.off:
            print("   ", reason)
        if profile:
            _profile(step)


_FIRST: dict[int, Any] = {}


def _profile(step: Any) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step(1)
        wait()
    events = [e for e in found.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / 1e3
    print(f"    GPU busy {total:.1f} ms, {sum(e.count for e in events)} kernels")
    for e in events[:16]:
        print(f"    {e.self_device_time_total / 1e3:>8.2f} ms {e.count:>5}  {e.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["0.5b:4096", "0.5b:16384", "7b:4096", "7b:16384"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--profile", nargs="*", default=[], help="variants of which kernels are listed")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}, torch {torch.__version__}", flush=True)
    known, module, optimizer = "", None, None
    for case in args.cases:
        size, tokens = case.split(":")
        if size != known:
            module = optimizer = None
            gc.collect()
            begin = time.perf_counter()
            module = model(size)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, fused=True)
            known = size
            print(f"{size}: built in {time.perf_counter() - begin:.1f} s", flush=True)
        assert module is not None
        vocabulary = module.config.vocab_size
        batches = [batch(int(tokens), vocabulary, seed) for seed in range(3)]
        print(f"{size}, {tokens} tokens in {len(batches[0]['input_ids'])} documents", flush=True)
        for name in args.variants:
            try:
                run(module, optimizer, name, batches, args.steps, args.warm, name in args.profile)
            except torch.cuda.OutOfMemoryError:
                print(f"  {name:<16} out of memory", flush=True)
            except Exception as error:
                import traceback

                print(f"  {name:<16} {type(error).__name__}: {str(error)[:300]}", flush=True)
                traceback.print_exc(limit=-6)
            for parameter in module.parameters():
                parameter.grad = None


if __name__ == "__main__":
    main()
