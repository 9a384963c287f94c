"""FSDP2 on one process: parameters are DTensors outside of forward, whole tensors inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import only_kernels, step, tiny
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    # no port: one of the environment would be taken, and be found by processes that later tests start
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard(model: Any, mesh: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@pytest.mark.parametrize("order", ("kernels first", "sharded first"))
@pytest.mark.parametrize("kind", ("qwen3", "gemma2"))
def test_fully_shard(order: str, kind: str, mesh: Any) -> None:
    expected, expected_grads = step(tiny(kind))
    model = tiny(kind)
    if order == "kernels first":
        handle = only_kernels(model)
        shard(model, mesh)
    else:
        shard(model, mesh)
        handle = only_kernels(model)
    names = list(model.state_dict())
    assert names == list(tiny(kind).state_dict())
    loss, grads = step(model)
    assert loss == pytest.approx(expected, rel=1e-5)
    whole = sum(float(g.norm()) ** 2 for g in expected_grads.values()) ** 0.5
    assert max(float((grads[n].full_tensor() - g).norm()) for n, g in expected_grads.items()) < 1e-5 * whole
    ops = handle.report.kernels.ops
    assert ops["rms_norm"].applied == ops["rms_norm"].calls == 9
    assert ops["rope"].calls == 2
    assert not any(o.original_calls or o.refused for o in ops.values()), ops


def test_the_bf16_policy(mesh: Any) -> None:
    model = tiny("llama")
    handle = only_kernels(model)
    shard(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    plain = shard(tiny("llama"), mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert step(model)[0] == pytest.approx(step(plain)[0], rel=5e-3)
    assert all(o.calls and not o.original_calls for o in handle.report.kernels.ops.values())


def test_sharded_weights_run_the_original_code(mesh: Any) -> None:
    """Outside of a forward of FSDP a weight is a DTensor, which no raw kernel may read."""
    model = tiny("llama")
    handle = only_kernels(model)
    shard(model, mesh)
    norm = model.model.layers[0].input_layernorm
    with pytest.raises(RuntimeError, match="DTensor"):  # the original's own answer to a plain input
        norm(torch.randn(2, 32))
    (reason,) = handle.report.kernels.ops["rms_norm"].original_calls
    assert reason == "LlamaRMSNorm: its weight is a DTensor"


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = tiny("llama")
    handle = only_kernels(model)
    assert handle.report.kernels.applied == 9
    assert all(p.is_meta for p in model.parameters())
    real = tiny("llama")
    model.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    for name, buffer in real.named_buffers():
        model.get_buffer(name).copy_(buffer)
    assert step(model)[0] == pytest.approx(step(real)[0], rel=1e-5)
    assert handle.report.kernels.ops["rope"].calls == 2
