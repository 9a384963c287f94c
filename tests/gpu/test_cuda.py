"""The main job on a CUDA device: real kernels, real widths of a small model, plain against accelerated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger import Settings, accelerate
from lightning_liger.head.linear_cross_entropy import linear_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = (200, 513, 64, 1, 377)


def _model(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config

    shape = {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    config = {
        "qwen2": lambda: Qwen2Config(**shape),
        "llama": lambda: LlamaConfig(**shape),
        "llama128": lambda: LlamaConfig(**{**shape, "num_attention_heads": 4}),
        "mistral": lambda: MistralConfig(**shape, sliding_window=100),
        "gemma2": lambda: Gemma2Config(**shape, head_dim=64, sliding_window=100),
    }[kind]()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to("cuda", dtype).train()


def _batch(left: bool) -> dict[str, Tensor]:
    width = max(LENGTHS)
    ids = torch.zeros(len(LENGTHS), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    generator = torch.Generator().manual_seed(0)
    for row, length in enumerate(LENGTHS):
        part = slice(width - length, width) if left else slice(0, length)
        ids[row, part] = torch.randint(1, 4096, (length,), generator=generator)
        mask[row, part] = 1
    labels = ids.masked_fill(mask == 0, -100)
    if left:
        # a first token is predicted from a padded position, which plain and packed runs do not share
        for row, length in enumerate(LENGTHS):
            labels[row, width - length] = -100
    return {k: v.cuda() for k, v in {"input_ids": ids, "attention_mask": mask, "labels": labels}.items()}


def _step(model: torch.nn.Module, batch: dict[str, Tensor], own_loss: bool) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    if own_loss:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), batch["labels"][:, 1:].reshape(-1))
    else:
        loss = model(**batch).loss
    loss.backward()
    return loss.item(), [p.grad.float().clone() for p in model.parameters() if p.grad is not None]


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    difference = torch.stack([(x - y).norm() for x, y in zip(a, b, strict=True)]).norm()
    return float(difference / torch.stack([y.norm() for y in b]).norm())


@pytest.mark.parametrize("backend", ["torch", "triton", "liger"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "llama128", "mistral", "gemma2"])
def test_bf16_is_within_plain_bf16s_own_error(kind: str, left: bool, backend: str) -> None:
    batch = _batch(left)
    reference_loss, reference = _step(_model(kind, torch.float32), batch, own_loss=False)
    model = _model(kind, torch.bfloat16)
    plain_loss, plain = _step(model, batch, own_loss=False)
    handle = accelerate(model, Settings(head_backend=backend))
    for own_loss in (False, True):
        loss, grads = _step(model, batch, own_loss)
        assert abs(loss - reference_loss) <= 2 * abs(plain_loss - reference_loss) + 2e-3 * reference_loss
        assert _distance(grads, reference) <= 1.1 * _distance(plain, reference)
    report = handle.report.to_dict()
    assert report["padding_free"]["packed_calls"] == 2, report
    assert report["fused_head"]["fused_calls"] == 2, report
    handle.revert()


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_fp32_is_equal(kind: str) -> None:
    batch = _batch(left=False)
    model = _model(kind, torch.float32)
    plain_loss, plain = _step(model, batch, own_loss=True)
    handle = accelerate(model, Settings(head_backend="torch"))
    loss, grads = _step(model, batch, own_loss=True)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert _distance(grads, plain) <= 1e-5
    assert handle.report.to_dict()["padding_free"]["packed_calls"] == 1
    handle.revert()


def test_documents_do_not_see_each_other() -> None:
    model = _model("qwen2", torch.bfloat16).eval()
    batch = _batch(left=False)
    handle = accelerate(model)
    with torch.no_grad():
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        before = model(**inputs).logits
        changed = inputs["input_ids"].clone()
        changed[0] = (changed[0] + 7) % 4096
        after = model(**{**inputs, "input_ids": changed}).logits
        real = batch["attention_mask"].bool()
        assert torch.equal(before[1:][real[1:]], after[1:][real[1:]])
        assert not torch.equal(before[0], after[0])
    handle.revert()


@pytest.mark.parametrize("backend", ["torch", "triton", "liger"])
@pytest.mark.parametrize("shape", [(37, 128, 1000), (3000, 896, 151936)], ids=["small", "qwen2.5-0.5b"])
def test_head_gradients_are_as_good_as_plain_bf16(shape: tuple[int, int, int], backend: str) -> None:
    n, hidden, vocab = shape
    torch.manual_seed(0)
    rows = torch.randn(n, hidden, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocab, hidden, device="cuda") * 0.02).bfloat16().requires_grad_()
    target = torch.randint(0, vocab, (n,), device="cuda")

    def grads(loss: Tensor) -> list[Tensor]:
        return [g.float() for g in torch.autograd.grad(loss, (rows, weight))]

    exact_rows, exact_weight = rows.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = F.cross_entropy(exact_rows @ exact_weight.T, target)
    reference = [g.float() for g in torch.autograd.grad(exact, (exact_rows, exact_weight))]
    plain = F.cross_entropy(F.linear(rows, weight).float(), target)
    fused = linear_cross_entropy(rows, weight, None, target, backend=backend)
    assert fused.item() == pytest.approx(exact.item(), rel=1e-3)
    for ours, theirs, true in zip(grads(fused), grads(plain), reference, strict=True):
        assert _distance([ours], [true]) <= 1.05 * _distance([theirs], [true])
