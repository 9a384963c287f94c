"""On a CUDA device: copies on a side stream give the same bits, the peak falls, and a long step takes no longer."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import transformers

from lightning_liger import Settings, accelerate
from lightning_liger.parallel.offloading import ActivationOffload, lane_for
from lightning_liger.parallel.recompute import recompute_blocks
from lightning_liger.patching import Switch

pytestmark = pytest.mark.gpu


def _model(layers: int = 12) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "vocab_size": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2**18}
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))
    return model.to(torch.bfloat16).train()


def _step(model: Any, ids: Any) -> tuple[float, list[Any]]:
    model.zero_grad()
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


def _run(ids: Any, mode: str, offloaded: bool, tiled: Any = False) -> tuple[Any, int, float]:
    model = _model()
    handle = accelerate(model, Settings(kernels=False, compile=False, tiled_mlp=tiled))
    blocks = list(model.model.layers)
    recompute_blocks(blocks, mode, Switch(True), lambda _: None)
    lane = lane_for(torch.device("cuda", torch.cuda.current_device()))
    assert lane is not None
    offload = ActivationOffload(blocks, lane, print) if offloaded else None
    for _ in range(2):
        _step(model, ids)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    found = _step(model, ids)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated()
    if offload is not None:
        assert offload.bytes > 0
        offload.close()
    handle.revert()
    return found, peak, seconds


@pytest.mark.parametrize(("mode", "tokens"), [("none", 8192), ("selective", 32768), ("full", 65536)])
def test_same_bits_in_less_memory(mode: str, tokens: int) -> None:
    ids = torch.randint(0, 1024, (1, tokens), device="cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, before, seconds = _run(ids, mode, False)
        ours, after, with_copies = _run(ids, mode, True)
    finally:
        torch.use_deterministic_algorithms(False)
    print(
        f"{mode} {tokens}: peak {before / 2**30:.2f} -> {after / 2**30:.2f} GiB, {seconds:.3f} -> {with_copies:.3f} s"
    )
    assert ours[0] == plain[0]
    # attention's backward adds in no fixed order
    for a, b in zip(ours[1], plain[1], strict=True):
        assert float((a.float() - b.float()).norm()) <= 2e-2 * float(b.float().norm())
    entry = tokens * 1024 * 2
    assert before - after >= 6 * entry, (before, after)
    if mode == "full":
        assert with_copies <= 1.1 * seconds


def test_chunks_cost_no_time_under_checkpoints() -> None:
    ids = torch.randint(0, 1024, (1, 65536), device="cuda")
    whole, before, seconds = _run(ids, "full", False)
    tiled, after, in_chunks = _run(ids, "full", False, tiled=8192)
    print(f"tiled: peak {before / 2**30:.2f} -> {after / 2**30:.2f} GiB, {seconds:.3f} -> {in_chunks:.3f} s")
    assert abs(tiled[0] - whole[0]) <= 1e-3 * abs(whole[0])
    for a, b in zip(tiled[1], whole[1], strict=True):
        assert float((a.float() - b.float()).norm()) <= 2e-2 * float(b.float().norm())
    assert before - after >= 2 * 65536 * 4096 * 2
    assert in_chunks <= 1.1 * seconds
